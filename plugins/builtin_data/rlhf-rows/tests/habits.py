"""Chat templates and tokenizers of every habit that trained spans must survive."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from .conftest import CHATML, byte_tokenizer

FOR = "{% for message in messages %}"
TEMPLATES = {
    "chatml": CHATML,
    "llama2": (  # strips, a stop token as text, the beginning-of-sequence token in the middle
        f"{FOR}{{% if message['role'] == 'user' %}}{{{{ bos_token + '[INST] ' + message['content'] | trim + ' [/INST]' }}}}"
        "{% else %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "headers": (  # the beginning of an answer is a blank line
        f"{{{{ bos_token }}}}{FOR}{{{{ '<|user|>' + message['role'] + '\n\n' + message['content'] | trim + eos_token }}}}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|user|>assistant\n\n' }}{% endif %}"
    ),
    "other stop": (  # turns end with a token that is not the tokenizer's, and the last one with both
        f"{FOR}{{{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|im_start|>\n' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "no generation prompt": f"{FOR}{{{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}}}{{% endfor %}}",
    "no stop": (
        f"{FOR}{{{{ message['role'] + ': ' + message['content'] + '\n' }}}}{{% endfor %}}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
}
REASONING = (  # reasoning is left out of all turns but the last, which has an empty block if it brings none
    f"{FOR}{{% set parts = message['content'].split('</think>') %}}{{{{ '<|im_start|>' + message['role'] + '\n' }}}}"
    "{% if message['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (parts[0].split('<think>')[-1].strip() if parts | length > 1 else '') + '\n</think>\n\n' }}{% endif %}"
    "{{ parts[-1].lstrip('\n') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHER_LAST_END = (  # another token ends the last answer than earlier ones
    f"{FOR}{{{{ '<|' + message['role'] + '|>' + message['content'] }}}}"
    "{{ '<|im_end|>' if loop.last and message['role'] == 'assistant' else '<|im_start|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OPENS_REASONING = (  # prompts with an opening that no answer has
    f"{FOR}{{{{ '<|' + message['role'] + '|>' + message['content'].split('</think>')[-1] + eos_token }}}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]


def merged_tokenizer(pre, decoder, after=None) -> PreTrainedTokenizerFast:
    """A BPE with merges across all that it may merge; padding and end are one token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre, decoder
    if after is not None:
        inner.post_processor = after
    texts = ["Yes,  it is. \n\n and more [INST] Is it so? [/INST] No: <3 assistant: user: system\n\n" * 20]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>")


class SlowTokenizer(PreTrainedTokenizer):
    """Characters, in Python: it knows no offsets."""

    def __init__(self, **options):
        super().__init__(bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>", **options)
        self.add_special_tokens({"additional_special_tokens": SPECIAL[1:2] + SPECIAL[3:]})

    vocab_size = 256

    def get_vocab(self):
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def byte_level(trim):
    return merged_tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel(), processors.ByteLevel(trim_offsets=trim)
    )


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "byte-level": lambda: byte_level(trim=False),
    "byte-level, trimmed offsets": lambda: byte_level(trim=True),
    "whole lines": lambda: merged_tokenizer(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), decoders.ByteLevel()
    ),
    "metaspace": lambda: merged_tokenizer(
        pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("\n", "isolated")]),
        decoders.Metaspace(prepend_scheme="first"),
    ),
    "slow": SlowTokenizer,
}
