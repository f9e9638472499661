"""The forms of bash that launch scripts use are read as bash expands them, and what only running gives is named."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from mt_core.errors import ConfigError
from mt_import.launch_scripts.launches import read_launch
from mt_import.launch_scripts.reading import read_script

FORMS = {
    "quotes and pieces": """A=x; train.py a'b c'"d $A" "" '' \\$A "\\$A" $A"y"$A""",
    "splitting": """A=" 1  2 "; B="--x 3"; train.py $A "$A" x$A'y' $B "$B" a$B""",
    "defaults": """A=; train.py ${A:-"d e"f g} ${A:+"no"}
train.py "${A:-d}" "${A-d}" "${B:-e}" "${B:-${C:-f g}}" ${B:+no} "${A:=h}" $A ${A:+yes}""",
    "arithmetic": """A=3; B=$A*2; train.py $((A*4)) $(( $A + 2 * (3 - 1) )) $((B % 4)) $((7/2)) $((-A))""",
    "operators of arithmetic": """A=8; ((A += 2)); let B=A*2; C=$[A-1]; ((C++))
train.py $A $B $C $((-7/2)) $((-7%3)) $((7/-2)) $((2**10)) $((1<<4 | 3)) $((A>4 && !B)) $((A==10?B:0))
train.py $((0x10+010+10#08)) $((-7 % -3)) $((1 +
2))
if ((A > 9)); then D=1; else D=2; fi; ((A > 99)) && D=3; train.py $D""",
    "elements": """A=(a b c d); A[1]=z; i=2; A[i+2]=e
train.py ${A[1]} ${A[$i]} ${A[i-2]} ${A[-1]} ${#A[@]} "${A[@]:3}" "${A[@]:1:2}" "${A[@]/#/--}" .""",
    "arrays": """A=(1 "2 3"); A+=(4); A=("${A[@]}" 5); B=(); train.py ${A[@]} "${A[@]}" "${A[*]}" "${B[@]}" $A ${#A}""",
    "appending": """A=1; A+=2; A+=" 3"; train.py $A "$A\"""",
    "continued lines": 'train.py a \\\n  b\\\nc "d\\\ne" # f\n',
    "comments": """A=( 1 # one
  # two
  3 ); train.py ${A[@]} a#b#""",
    "changes": """A=/x/y.tar.gz; train.py ${A##*/} ${A#*/} ${A%.*} ${A%%.*} ${A/y/z} ${A//x/w} ${A^^} ${#A}""",
    "parts": """A=a/b.c1; train.py ${A:0:1} ${A:2} ${A: -2} ${A//\\//_} ${A/#a/x} ${A/%1/x} ${A//[0-9]/} ${A//./ }
B=A; train.py ${!B}""",
    "if": """if [ -z "$A" ]; then A=1; fi; if [[ $A == 1 && -n "$A" ]]; then B=2; elif false; then B=3; else B=4; fi
if [ "$A" -gt 3 ] || [ $B = 2 ]; then C=5; fi; train.py $A $B $C""",
    "case": """for_="b"; case "$for_" in a|"c") A=1 ;; b*) A=2;; *) A=3 ;; esac; train.py $A""",
    "tests as commands": """[ -n "$A" ] && B=1 || B=2; [[ x == y ]] || C=3; train.py $B $C""",
    "quoted patterns": """A="*"; case a in "$A") B=1;; *) B=2;; esac; [[ abc == "a*" ]] && C=1 || C=2
[ abc = a* ] && D=1 || D=2; [[ abc == a* ]] && E=1; train.py $B $C $D $E""",
    "escapes": """A="$(echo ")")"; train.py $'a\\tb' $"c" .""",
    "a function's own state": """f() { local A=2; if [ "$1" = x ]; then B=$A; return; fi; B=3; }
A=1; f x; train.py $A $B""",
    "forms of functions": """function f { A=1; }; function g-h() { B=2; }; f; g-h
i() (A=3; train.py $A $B); i; train.py $A""",
    "subshells": """A=1; (A=2; exit 1); echo | A=3; bash -c 'A=4; exit 0'; train.py $A
bash -c 'train.py ${A:-none} $1' x y""",
    "an exit in a branch": """usage() { exit 1; }
"""
    + "if [ -f none ]; then usage a; fi\n" * 21
    + """train.py "${1:-none}" .""",
    "changes in a branch": """A=1; B=2; export B; set -- a b
if [ -f none ]; then export A; shift; fi; train.py x; bash -c 'train.py ${A:-none} $B'""",
    "arguments": """set -- a b c; shift; shift 3; train.py "$@" "x$@y" $#""",
    "a command that fails": """false && train.py a; ! true || train.py b; if ! train.py c; then :; fi""",
    "words that begin with do": """while test -f domain; do A=1; done; for todo in do a; do B=1; done
until sudo() { :; }; do C=1; done; train.py x""",
    "functions": """run() { local X=$1; shift; train.py "$@" $X $#; }; run a b "c d\"""",
    "groups and pipes": """((B = 1)); { A=1; } ; mkdir -p x >/dev/null 2>&1 ; train.py $A 2>&1 | tee log | cat""",
    "patterns that are no files": """train.py '([0]*3+[1]*58)' "Et*3|(tt|)*6mL" *.nothing""",
    "parts of a path": """A=/x/y.sh; B=x/; C=y; train.py $(basename "$A") $(dirname "$A") $(basename ${B}) .
train.py $(dirname "$B") "$(dirname -- "$C")" $(basename "$C")
if [ "$(basename "$A")" = "y.sh" ]; then D=1; fi; train.py $D
E=/; F=; G="a b/c d"; train.py $(basename $E) $(dirname $E) "$(basename "$F")" "$(dirname "$F")" "$(basename "$G")\"""",
    "unset": """A=1; unset A; train.py "${A:-gone}\"""",
    "eval": """A='train.py a "b c"'; eval $A""",
    "heredoc": """A=1; bash <<EOF
B=2; train.py $A \\$B
EOF
""",
    "behind a heredoc": """cat <<'EOF' > /dev/null; train.py a && cat <<A <<-'B' | true; train.py b
$(
EOF
A
	)
	B
cat <<EOF | bash; bash <<< "train.py d"
train.py c
EOF
""",
    "quoted heredoc": """A=1; export A; bash <<'EOF'
train.py $A
EOF
""",
    "braces that are words": """A={1,2}; train.py $A {} {a} "{a,b}" \\{a,b} {a\\,b} {1..} a@{0} {a","b} ${B:-{}}""",
    "separators as they were": """OLD=$IFS; A="1 2"; IFS=,; B=3; train.py "$A" $B; IFS=$OLD; train.py $A
A=(1 2); f() { local IFS=+; train.py ${A[*]} "${A[@]}"; }; f; IFS=, read C <<< "a,b"; train.py $A""",
    "an integer of a function": """f() { local -i A=3; train.py $A; }; f; A=1+1; train.py $A
declare -i B=4; g() { local B=1+1; train.py $B; }; g; train.py $B""",
    "an integer that is one": """declare -i A=3; declare -l B=4; A=-5; train.py $A $B""",
    "another shell": """A='train.py a "b c"'; sh -c "$A"; true""",
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_are_read_as_bash_expands_them(form: str, tmp_path: Path) -> None:
    """The reference is bash itself, which runs a `train.py` that prints its words."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not on the PATH")
    program = tmp_path / "train.py"
    program.write_text(f'#!{bash}\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(FORMS[form])
    done = subprocess.run(
        [bash, script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    read = read_script(script, {}, [])
    words = [word for command in read.commands for word in command.words[1:]]
    assert read.unknowns.reasons_in(words) == []
    assert "".join(f"{word}\n" for word in words) == done.stdout


LAUNCHES = {
    "torchrun --nproc-per-node=4 --nnodes 2 pretrain_gpt.py --a": ("pretrain_gpt.py", 4, 2),
    "python -m torch.distributed.launch --nproc_per_node 8 pretrain_bert.py --a": ("pretrain_bert.py", 8, 1),
    "srun -N 3 --ntasks-per-node=8 python -u pretrain_gpt.py --a": ("pretrain_gpt.py", 8, 3),
    "srun -n 16 --nodes=2 nsys profile -o x python pretrain_gpt.py --a": ("pretrain_gpt.py", 8, 2),
    "accelerate launch --num_processes 4 train.py --a": ("train.py", 4, 1),
    "RANK=0 WORLD_SIZE=1 python pretrain_gpt.py --a": ("pretrain_gpt.py", 1, 1),
    "torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py --a": ("pretrain_gpt.py", 8, None),
    "#SBATCH --nodes=2 # two\n#SBATCH --ntasks-per-node 4\nsrun -l python pretrain_gpt.py --a": (
        "pretrain_gpt.py",
        4,
        2,
    ),
    "#SBATCH -N 4\nsrun -N 2 -n 16 python pretrain_gpt.py --a": ("pretrain_gpt.py", 8, 2),
    "#SBATCH --nodes=2\npython pretrain_gpt.py --a": ("pretrain_gpt.py", 1, 1),
    "true\n#SBATCH --nodes=2\nsrun python pretrain_gpt.py --a": ("pretrain_gpt.py", 1, 1),
    "#SBATCH --ntasks-per-node=1\nsrun torchrun --nproc-per-node 8 pretrain_gpt.py --a": ("pretrain_gpt.py", 8, 1),
    "python tools/prepare.py x; torchrun --nproc_per_node 2 pretrain_gpt.py --a": ("pretrain_gpt.py", 2, 1),
}


@pytest.mark.parametrize("line", LAUNCHES)
def test_launchers_say_how_many_processes(line: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(line)
    launch, _ = read_launch(script, {}, [], ["pretrain_gpt.py", "pretrain_bert.py"])
    assert (launch.script, launch.nproc, launch.nnodes) == LAUNCHES[line]
    assert launch.arguments == ["--a"]


UNKNOWN = {
    "train.py $A": "$A is not set in the script: give --define A=VALUE",
    "train.py $2": "$2 is argument 2 of the script: give --arg VALUE",
    "A=$(hostname); train.py $A": "$(hostname) is the output of a command, which is not run",
    "if [ $X = 1 ]; then A=2; fi; train.py $A": "decided by `if [ $X = 1 ]` in line 1: give --define A=VALUE",
    "for i in 1 2; do A=$i; done; train.py $A": "decided by `for i in 1 2` in line 1",
    "A=$((B+1)); train.py $A": "$B is not set in the script",
    "case $X in a) A=1;; esac; train.py $A": "decided by `case $X in a) A=1` in line 1",
    "train.py ${A:?say}": "$A is not set in the script",
    "i=1; for i in 2; do :; done; train.py $i": "$i is decided by `for i in 2` in line 1",
    "A=1; ((A += B)); train.py $A": "$B is not set in the script",
    "A=1; read A <<< 2; train.py $A": "$A is what line 1 reads",
    "declare -A M=([a]=1 [b]=2); train.py ${M[b]}": "$M is an array with keys",
    "set -- a b; if [ -f x ]; then shift; fi; train.py $1": "$@ is decided by `if [ -f x ]` in line 1",
    "train.py --a {1..3}": "{1..3} is a brace expansion, which is not read",
    "A=1; train.py x{$A,'b c'}y": "is a brace expansion",
    "A=({a,b}); train.py $A": "{a,b} is a brace expansion",
    "IFS=,; A=1,2; train.py $A": "IFS separates words here by what the script sets",
    "IFS=; A='1 2'; train.py $A": "IFS separates words here",
    'A=(1 2); IFS=+; B="${A[*]}"; train.py "$B"': "IFS separates words here",
    'A=(1 2); IFS=+; train.py "${A[*]}"': "IFS separates words here",
    "declare -i A=1; A=A+1; train.py $A": "$A is changed by `declare -i` in line 1, which is not read",
    "declare -i A=1; A+=1; train.py $A": "$A is changed by `declare -i`",
    "declare -i A=1; f() { local A=2; }; f; A=A+1; train.py $A": "$A is changed by `declare -i` in line 1",
    "typeset -u A; A=x; train.py $A": "$A is changed by `declare -u`",
    "if [ -f x ]; then f() { A=1; }; fi; f; train.py $A": "$A is decided by `if [ -f x ]` in line 1",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_values_that_only_running_gives_are_named(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    read = read_script(script, {}, [])
    [reason] = read.unknowns.reasons_in(read.commands[0].words)
    assert UNKNOWN[text] in reason
    assert read.unknowns.readable(read.commands[0].words[-1]).startswith(("$", "{"))


def test_nothing_in_a_script_is_executed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"touch {tmp_path}/made; A=$(touch {tmp_path}/made); `touch {tmp_path}/made`; train.py ${{A:-x}}")
    read_script(script, {}, [])
    assert not (tmp_path / "made").exists()


REFUSED = {
    "echo hello": "starts no Python script that ends in .py",
    "if [ $# -lt 2 ]; then echo usage; exit 1; fi; torchrun pretrain_gpt.py": "it ends with the exit in line 1",
    "if [ -f x ]; then torchrun pretrain_gpt.py --a; fi": "this command runs is decided by `if [ -f x ]` in line 1",
    "python a.py; python b.py": "starts 2 programs: a.py in line 1, b.py in line 1",
    "A=(1 2": "line 1: an array has no end",
    'A="x': 'line 1: " has no partner',
    "\nif [ x ]; then\n  A=1\n": "line 4: expected fi",
    "cat <<EOF\nx": "has no line EOF",
    "f() { f; }; f": "call one another more than 20 deep",
    "{ " * 60: "nested more than 40 deep",
    "torchrun )": "')' stands where a command belongs",
}


@pytest.mark.parametrize("text", REFUSED)
def test_scripts_that_cannot_be_followed(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_launch(script, {}, [], ["pretrain_gpt.py"])
    assert REFUSED[text] in str(error.value)
