"""A script with a command in it is translated, or refused in one line that names a line; nothing else ever happens."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from rlhf_translate.commands import find_commands

from rlhf_host import UserError

COMMANDS = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=M",
    "accelerate launch --num_processes 4 examples/scripts/dpo.py --model_name_or_path M --dataset_name D",
    "deepspeed --module openrlhf.cli.train_dpo --pretrain M --dataset D",
)
PROBE = "$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)"
WORDS_IN_LINES = r"""x  $X  ${X}  "$X"  ${X:-y}  $(nproc)  `hostname`  $((A*2))  $((1/0))  $[1+2]  ${#X}  ${X[@]}  ${X[$i]}  ${!X}
${X%%.*}  ${X##*/}  ${X//a/b}  ${X:1:2}  ${X^^}  ${X@Q}  ${@:2}  $@  $*  $#  $?  $$  $!  $0  $1  ${10}  <(cat a)  >(tee b)
a{1,2}  {1..3}  $'a\nb'  $"hi"  ~  *  ?  [a-z]  \  '  "  $(  ${  $((  `  }  {  )  (  |  &  ;  &&  ||  <  >  <<<  <<  <<EOF  2>&1
&>  >>log  !  #  =  +=  [[  ]]  [  ]  if  then  else  elif  fi  for  while  until  do  done  case  in  esac  ;;  ;&  function
f()  select  time  eval  exec  set  --  shift  shift 2  local  export  declare -A m  unset X  read X  exit  return  source a.sh
. b.sh  bash c.sh  bash -c  trap  X=1  X+=1  X=(a b)  X+=(c)  X[1]=a  ((X++))  let X=1  EOF  ...  srun  nohup  env A=1  uv run
python3  ray job submit --  tee log  --y z  a.b=c  +a.b=c  ~a.b  a={b:1}  a=[1,2]  a@b=c  true  false  coproc"""
"""Words and signs, two blanks between them."""
WORDS = (
    *re.split("  |\n", WORDS_IN_LINES),
    *("'a b'", "${X//python train.py a/b}", "${X:?python3 a b}", "${X:+--flag $X}", '[ -z "$X" ]', '[ "${X:-1}" != 0 ]'),
    *("[[ $X == a* && -n $Y ]]", "[[ $X =~ ^a.*$ ]]", "$(cat <<EOF\na\nEOF\n)", "$(if true; then echo a; fi)", "$( (a) )"),
    *(
        "$(case x in a) echo;; esac)",
        "((X = Y * 2))",
        "python3 -c 'print(1)'",
        "printf -v X %s a",
        f"${{X:-{PROBE}}}",
        "f () {",
    ),
    *("\n", "\n", "\n", "\t", "é", "\x00", "\r\n"),
)
FRAMES = (
    "COMMAND",
    'if [ "$D" = gpu ]; then\nCOMMAND\nfi',
    "if python3 -c 'import x' 2>/dev/null; then A=1; else A=2; fi\nCOMMAND",
    'case "$D" in\n gpu) A=(x y);;\n npu) A=(x z) ;;\n *) exit 1;;\nesac\nCOMMAND',
    "for i in 1 2; do\nCOMMAND\ndone",
    "while read l; do\nCOMMAND\ndone < f",
    'f() {\nCOMMAND\n}\nf "$@"',
    "( COMMAND )",
    "{ COMMAND; } &",
    "bash -c 'COMMAND'",
    "cat > job.sh <<EOF\nCOMMAND\nEOF\nbash job.sh",
    "A=$(COMMAND)",
    'eval "COMMAND"',
    "set -e; cd x && COMMAND || exit 1",
    f'D=${{D:-{PROBE}}}\nL=(python3)\nif [ "${{U:-1}}" != 0 ] && [ "${{D:-gpu}}" = gpu ] && {{ [ "$E" = a ] || [ "$E" = b ]; }}; '
    "then L=(uv run python3); fi\nCOMMAND",
)


def fragment(chance: random.Random, most: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(most)))


def script_of(seed: int) -> str:
    chance = random.Random(seed)
    command = f"{chance.choice(COMMANDS)} {fragment(chance, 4)}"
    for _ in range(chance.randrange(3)):
        command = chance.choice(FRAMES).replace("COMMAND", command)
    before = [fragment(chance, 5) for _ in range(chance.randrange(4))]
    return "\n".join([*before, command, fragment(chance, 4)])


def outcome_of(text: str) -> str:
    try:
        find_commands(Path("s.sh"), text=text)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first", [0, pytest.param(1_000, marks=pytest.mark.slow)])
def test_no_script_ends_in_an_exception(first):
    refused = 0
    for seed in range(first, 1_000 if not first else 20_000):
        said = outcome_of(script_of(seed))
        refused += bool(said)
        assert not said or re.fullmatch(r"s\.sh:\d+: [^\n]+", said), (seed, said)
    assert refused < 0.4 * (1_000 if not first else 19_000)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_whole_command_is_found_wherever_it_stands(command, frame):
    text = frame.replace("COMMAND", f"{command} {PROBE}")
    said = outcome_of(text)
    if "A=$(" in frame:
        assert re.fullmatch(r"s\.sh:1: \S+ is in a substitution, .*: write its command on a line of its own", said)
    elif "'COMMAND'" in frame:  # whose quotes end in the probe
        assert not said or said.startswith("s.sh:")
    else:
        assert not said
