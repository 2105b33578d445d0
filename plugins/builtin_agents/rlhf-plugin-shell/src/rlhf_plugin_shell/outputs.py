"""Text that tells the policy of a command."""

from __future__ import annotations

from rlhf_plugin_code_exec.shells import Ran

ENDED = {
    "output": "it wrote too much",
    "memory": "it used too much memory",
    "disk": "its files are too large: remove some",
    "files": "it has too many files: remove some",
}
_CONTROL = {code: "\ufffd" for code in range(32) if chr(code) not in "\t\n"} | {127: "\ufffd"}


def told(ran: Ran, seconds: float, most: int) -> str:
    """Returns exit code and output, of which at most ``most`` characters are shown: its head and its tail."""
    if ran.why == "ended":
        head = f"exit code {ran.code}"
    elif ran.why == "late":
        head = f"ended: it took longer than {seconds:g} s"
    else:
        head = f"ended: {ENDED[ran.why]}"
    lost = "[its variables are too large: the next command does not have them]" if ran.lost else ""
    output = shortened(readable(ran.output), most)
    return "\n".join(part for part in (head, output, lost) if part)


def readable(output: str) -> str:
    """Returns output without control characters, and with line ends as Unix has them."""
    return output.replace("\r\n", "\n").translate(_CONTROL).strip("\n")


def shortened(text: str, most: int) -> str:
    """Returns head and tail of a long text, with the number of characters that are left out between them."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[len(text) - half :]}"
