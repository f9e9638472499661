"""The command tree, errors and exit codes."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

from mt_cli import main
from mt_cli.app import DIAGNOSIS, build_group
from mt_cli.command_homes import COMMAND_HOMES
from mt_cli.plugin import mt_register_commands
from mt_core.commands import need
from mt_core.errors import CheckpointError, ConfigError, MtError, PluginError
from mt_core.hookspecs import hookimpl
from mt_core.kinds import Lazy
from mt_core.plugins import Plugin, PluginHost, load_plugins
from mt_core.specs import CommandSpec

OWN = ["train", "verify", "plan", "generate", "models", "config", "plugins", "bench", "doctor"]
OTHERS = ["ckpt", "convert", "data", "moe"]


def commands_in(help_text: str) -> list[str]:
    panel = help_text[help_text.index("Commands") :]
    return re.findall(r"^. (\w[\w-]*)  ", panel, flags=re.MULTILINE)


def test_mt_alone_shows_help(mt) -> None:
    alone, asked = mt(), mt("--help")
    assert alone.code == asked.code == 0
    assert alone.out == asked.out
    assert {*OWN, *OTHERS} <= set(commands_in(asked.out))
    assert commands_in(asked.out)[0] == "train"
    assert "Train a model; without arguments a small GPT" in asked.out


@pytest.mark.parametrize("command", [*OWN, *OTHERS])
def test_every_command_has_help(mt, command: str) -> None:
    outcome = mt(command, "--help")
    assert outcome.code == 0
    assert f"Usage: mt {command}" in outcome.out


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plugins", "--json"], ["--version"]])
def test_listing_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom mt_cli.main import run\n"
        f"assert run({arguments!r}) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'pydantic_core', 'mt_core.config'} & set(sys.modules)\n"
        "commands = {name for name in sys.modules if name.startswith(('mt_data.commands', 'mt_ckpt.commands'))}\n"
        "print(sorted(heavy | commands), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_version_lists_the_distributions(mt) -> None:
    outcome = mt("--version")
    assert outcome.code == 0
    for name in ("mt-core", "mt-cli", "mt-models", "mt-data", "mt-ckpt", "mt-moe"):
        assert [name, version(name)] in outcome.lines


def test_a_mistyped_command_or_option_exits_2(mt) -> None:
    outcome = mt("trian")
    assert outcome.code == 2
    assert "No such command 'trian'" in outcome.err
    assert "'train'" in outcome.err
    assert mt("plugins", "--jason").code == 2


@pytest.mark.slow
def test_an_error_of_the_user_is_one_line(mt_process) -> None:
    outcome = mt_process("config", "show", "--set", "train.sede=1")
    assert outcome.code == ConfigError.exit_code == 2
    assert outcome.out == ""
    assert outcome.err == 'error: unknown key train.sede (from --set) (did you mean "seed"?)\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--debug", "config", "show", "--set", "train.sede=1"], {}),
        (["config", "show", "--debug", "--set", "train.sede=1"], {}),
        (["config", "show", "--set", "train.sede=1"], {"MT_DEBUG": "1"}),
    ],
)
def test_debug_shows_the_traceback(mt_process, arguments: list[str], environment: dict[str, str]) -> None:
    outcome = mt_process(*arguments, **environment)
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert "ConfigError: unknown key train.sede" in outcome.err


def test_debug_is_taken_from_before_the_dashes_only() -> None:
    assert main.take_debug(["a", "--debug", "b"]) == (["a", "b"], True)
    assert main.take_debug(["a", "--", "--debug"]) == (["a", "--", "--debug"], False)
    assert main.take_debug([]) == ([], False)


@pytest.mark.parametrize("error", [MtError, ConfigError, PluginError, CheckpointError])
def test_exit_codes_are_those_of_the_errors(monkeypatch, capsys, error: type[MtError]) -> None:
    def fail(**_: object) -> PluginHost:
        raise error("first line\nsecond line")

    monkeypatch.setattr(main, "load_plugins", fail)
    assert main.run(["anything"]) == error.exit_code
    assert capsys.readouterr().err == "error: first line\n       second line\n"


def test_a_defect_keeps_its_traceback(monkeypatch) -> None:
    monkeypatch.setattr(main, "load_plugins", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main.run(["anything"])


# -- commands of other plugins ------------------------------------------------------------------------

PLUGIN_COMMANDS = """
    import os, signal
    from typing import Annotated
    import typer
    from mt_core.commands import typed_words
    from mt_core.errors import DataError

    app = typer.Typer(no_args_is_help=True)

    @app.command()
    def hello(name: str, times: Annotated[int, typer.Option()] = 1):
        for _ in range(times):
            print("hello", name)

    @app.command()
    def fail():
        raise DataError("no data")

    @app.command()
    def again(context: typer.Context, name: str, times: Annotated[int, typer.Option()] = 1):
        print(typed_words(context))

    @app.command()
    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        import time; time.sleep(5)

    def alone(name: str = "nobody"):
        "Greets."
        print("alone", name)

    not_a_command = 3
"""


@pytest.fixture
def with_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """Runs `mt` with the commands of a plugin: name -> attribute of its module, or a whole reference."""
    module = f"commands_of_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(textwrap.dedent(PLUGIN_COMMANDS))
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(
        commands: dict[str, str], *arguments: str, owners: int = 1, unknown: tuple[str, ...] = ()
    ) -> tuple[int, str]:
        host = PluginHost()
        host.unknown_names.extend(unknown)
        for number in range(owners):
            specs = [
                CommandSpec(name=name, doc=f"Doc of {name} [x]", app=Lazy(app if ":" in app else f"{module}:{app}"))
                for name, app in commands.items()
            ]
            plugin = type("Module", (), {"mt_register_commands": staticmethod(hookimpl(lambda specs=specs: specs))})
            host.add(plugin, Plugin(f"p{number}", module, f"dist-{number}", "7.0"))
        monkeypatch.setattr(main, "load_plugins", lambda **_: host)
        code = main.run(arguments)
        written = capsys.readouterr()
        return code, written.out + written.err

    return call


def test_an_app_and_a_function_are_commands(with_commands) -> None:
    commands = {"greet": "app", "alone": "alone"}
    assert with_commands(commands, "greet", "hello", "you", "--times", "2") == (0, "hello you\nhello you\n")
    assert with_commands(commands, "alone") == (0, "alone nobody\n")
    assert with_commands(commands, "alone", "--name", "me") == (0, "alone me\n")
    code, text = with_commands(commands, "--help")
    assert code == 0
    assert commands_in(text)[-2:] == ["alone", "greet"]
    assert "Doc of greet [x]" in text
    assert "--install-completion" not in with_commands(commands, "greet", "--help")[1]


def test_a_command_of_a_group_can_be_started_again_as_it_was_typed(with_commands) -> None:
    line = ["greet", "again", "--times", "2", "you"]
    assert with_commands({"greet": "app"}, *line) == (0, f"{line}\n")


def test_errors_of_a_plugins_command(with_commands) -> None:
    assert with_commands({"greet": "app"}, "greet", "fail") == (4, "error: no data\n")
    assert with_commands({"greet": "app"}, "greet", "interrupt")[0] == 128 + signal.SIGINT
    code, text = with_commands({"greet": "app"}, "greet", "hello", "you", "--times", "many")
    assert code == 2
    assert "--times" in text


@pytest.mark.parametrize(
    ("app", "says"),
    [
        ("a_module_that_is_not_there:app", "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"),
        ("no_such_attribute", "AttributeError"),
        ("not_a_command", "TypeError: expected a typer app or a function, got int"),
    ],
)
def test_a_broken_command_names_its_plugin(with_commands, app: str, says: str) -> None:
    assert "broken" in commands_in(with_commands({"broken": app}, "--help")[1])
    code, text = with_commands({"broken": app}, "broken", "--anything")
    assert code == PluginError.exit_code == 3
    assert text.startswith('error: mt broken, brought by plugin "p0" (dist-0 7.0), cannot be loaded: ')
    assert says in text


def test_a_command_of_two_plugins_names_both(with_commands) -> None:
    code, text = with_commands({"greet": "app"}, "greet", "hello", "you", owners=2)
    assert code == 3
    assert 'plugin "p0" (dist-0 7.0) and plugin "p1" (dist-1 7.0)' in text


def test_every_registered_command_of_mt_has_its_distribution_on_record() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "command_homes.py"))
    assert script["registered_homes"]() == COMMAND_HOMES, "run scripts/command_homes.py"


def test_mts_commands_say_where_they_come_from(with_commands) -> None:
    """Without their plugins, mt's own commands are errors that help, and `mt plugins` still runs."""
    code, text = with_commands({}, "data")
    assert (code, text) == (3, "error: mt data is a command of mt-data, which is not installed (pip install mt-data)\n")
    assert with_commands({}, "train")[0] == 3
    for command, home in COMMAND_HOMES.items():
        # The group of another distribution may be there, its command may not.
        groups = {command.split()[0]: "app"} if " " in command else {}
        code, text = with_commands(groups, *command.split(), "x", "--option")
        assert (code, text) == (
            3,
            f"error: mt {command} is a command of {home}, which is not installed (pip install {home})\n",
        )
    wrong = "MT_PLUGINS names mt-data, which is a distribution"
    assert with_commands({}, "data", unknown=(wrong,)) == (3, f"error: {wrong}\n")
    code, text = with_commands({"greet": "app"}, "plugins")
    assert code == 0
    assert "Doc of greet [x]" in text


@pytest.mark.parametrize("home", sorted({*COMMAND_HOMES.values(), "mt-cli"}))
def test_every_command_of_a_distribution_that_mt_plugins_leaves_out_names_it(mt, monkeypatch, home: str) -> None:
    """Commands within groups of other distributions, too. mt-cli's diagnosis stays."""
    plugins = load_plugins().plugins
    left_out = {plugin.name for plugin in plugins if plugin.distribution == home}
    monkeypatch.setenv("MT_PLUGINS", ",".join(sorted({plugin.name for plugin in plugins} - left_out)))
    own = [spec.name for spec in mt_register_commands() if spec.name not in DIAGNOSIS] if home == "mt-cli" else []
    for command in [*own, *(command for command, of in COMMAND_HOMES.items() if of == home)]:
        outcome = mt(*command.split(), "x")
        assert outcome.code == 3, command
        assert outcome.err.startswith(f"error: mt {command} is a command of {home}, which is missing: "), command


def test_help_says_that_a_plugin_is_missing(monkeypatch, mt_process) -> None:
    others = "accelerate, ckpt, core, data, eval, import, infer, models, moe, ops, retrieval, tools, tune"
    assert f"Left out by MT_PLUGINS: {others}." in mt_process("--help", MT_PLUGINS="cli").out
    host = PluginHost()
    host.add(
        type("Broken", (), {"mt_register_commands": staticmethod(hookimpl(lambda: 3))}), Plugin("b", "m", "d", "1")
    )
    assert "Missing, or missing a part: b." in (build_group(host).epilog or "")


@pytest.mark.slow
def test_strict_stops_commands_but_not_the_diagnosis(mt_process) -> None:
    strict = {"MT_PLUGINS_STRICT": "1", "MT_PLUGINS": "cli,core,ghost"}
    outcome = mt_process("config", "keys", **strict)
    assert outcome.code == 3
    assert "MT_PLUGINS names ghost, which is not installed" in outcome.err
    assert mt_process("plugins", **strict).code == 0


# -- what a command needs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (["torch"], 'mt train needs torch; pip install "mt-core[train]"'),
        (["mt_models", "mt_ckpt"], "mt train needs mt-models and mt-ckpt; pip install mt-models mt-ckpt"),
        (
            ["torch", "mt_models", "mt_data", "mt_ckpt"],
            "mt train needs torch, mt-models, mt-data and mt-ckpt; "
            'pip install "mt-core[train]" mt-models mt-data mt-ckpt',
        ),
    ],
)
def test_need_names_what_is_missing(monkeypatch, missing: list[str], says: str) -> None:
    monkeypatch.setattr("mt_core.commands.find_spec", lambda name: None if name in missing else object())
    monkeypatch.setattr("mt_core.commands.load_plugins", PluginHost)
    with pytest.raises(PluginError) as error:
        need("torch", "mt-models", "mt-data", "mt-ckpt", command="mt train")
    assert str(error.value) == says


def test_another_plugin_may_stand_in(monkeypatch) -> None:
    """The real host registers model families, so that mt-models in particular is not needed."""
    monkeypatch.setattr("mt_core.commands.find_spec", lambda name: None if name == "mt_models" else object())
    need("torch", "mt-models", command="mt train")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    """By the script that --install-completion writes, as a shell calls it."""
    code = "import sys; from mt_cli.main import main; sys.exit(main())"
    (tmp_path / "mt").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$@\"\n")
    (tmp_path / "mt").chmod(0o755)
    script = tmp_path / "complete.sh"
    script.write_text(
        "mt --install-completion >&2 && source ~/.bash_completions/mt.sh\n"
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mt_completion mt; echo "${COMPREPLY[*]}"; }\n'
        "ask mt tr\nask mt config e\nask mt train --pres\n"
    )
    environ = {**os.environ, "HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "SHELL": "/bin/bash"}
    done = subprocess.run(["bash", str(script)], env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["train", "explain", "--preset"], done.stderr
