"""Rounds, report and command line of the benchmark, without a clock."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("lmdb")
pytest.importorskip("rocksdict")

from benchmarks import environment
from benchmarks.__main__ import main, parse_options, scratch_folder
from benchmarks.cases import BEST_PEER, Case, Entrant, Target
from benchmarks.protocol import OURS
from benchmarks.report import as_json, print_report, write_json
from benchmarks.runner import CaseResult, run_rounds
from benchmarks.stats import Verdict


def a_case(seconds: dict[str, float], *targets: Target, seen: list[str] | None = None) -> Case:
    def run(name: str, folder: Path) -> float:
        assert list(folder.iterdir()) == []
        (folder / "left behind").write_text(name)
        if seen is not None:
            seen.append(name)
        return seconds[name]

    return Case(
        name="case",
        title="some work",
        clock="none",
        messages=100,
        entrants=tuple(Entrant(name, functools.partial(run, name)) for name in seconds),
        targets=targets,
    )


def run_case(case: Case, scratch: Path, *, rounds: int = 3, seed: int = 1) -> CaseResult:
    (result,) = run_rounds([case], rounds=rounds, seed=seed, scratch=scratch, step=lambda *_: None)
    return result


def test_everyone_runs_once_a_round_in_an_order_given_by_the_seed(tmp_path: Path) -> None:
    names = dict.fromkeys("abcdef", 1.0)
    orders: list[list[str]] = []
    for seed in (1, 1, 2):
        orders.append([])
        run_case(a_case(names, seen=orders[-1]), tmp_path, rounds=4, seed=seed)

    assert orders[0] == orders[1] != orders[2]
    rounds = [orders[0][i : i + 6] for i in range(0, 24, 6)]
    assert [sorted(order) for order in rounds] == [list("abcdef")] * 4
    assert len({tuple(order) for order in rounds}) > 1
    assert list(tmp_path.iterdir()) == []


def test_a_target_against_the_best_peer_names_it(tmp_path: Path) -> None:
    target = Target(peer=BEST_PEER, must=0.9, bold=1.2, best_of=("slow", "fast"))
    case = a_case({OURS: 1.0, "slow": 4.0, "fast": 0.5, "limit": 0.1}, target)

    (comparison,) = run_case(case, tmp_path).comparisons()

    assert comparison.peer == "fast"
    assert comparison.ratios == (0.5, 0.5, 0.5)
    assert comparison.verdict is Verdict.MISS


def test_without_our_store_targets_are_not_measured(tmp_path: Path) -> None:
    case = a_case({"peer": 1.0}, Target(peer="peer", must=2.0))

    (comparison,) = run_case(case, tmp_path).comparisons()

    assert comparison.verdict is Verdict.NOT_MEASURED
    assert comparison.spread is None


def test_the_report_names_what_was_missed_and_the_json_holds_each_round(tmp_path: Path) -> None:
    case = a_case({OURS: 2.0, "peer": 1.0}, Target(peer="peer", must=1.0, bold=2.0))
    result = run_case(case, tmp_path)
    console = Console(record=True, width=120, quiet=True)
    out = tmp_path / "new" / "bench.json"

    with console.capture() as text:
        console.quiet = False
        print_report(console, [result])
    write_json(out, as_json([result], environment={"python": "3"}, options={"rounds": 3}))

    assert "1 missed: some work: brokerlab ÷ peer" in text.get()
    (written,) = json.loads(out.read_text())["cases"]
    assert written["contestants"]["peer"]["seconds"] == [1.0, 1.0, 1.0]
    assert written["contestants"]["peer"]["median"] == 100.0
    assert written["targets"][0]["ratios"] == [0.5, 0.5, 0.5]
    assert written["targets"][0]["verdict"] == "miss"


def test_the_scratch_folder_removes_only_what_it_made(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("of the user")

    with scratch_folder(tmp_path) as folder:
        (folder / "data").write_text("x")
    with scratch_folder(tmp_path / "made"):
        pass

    assert list(tmp_path.iterdir()) == [kept]


def test_a_full_disk_is_refused_with_a_clear_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "FREE_BYTES_MIN", 1 << 62)

    code = main(["--quick", "--dir", str(tmp_path / "scratch"), "--out", str(tmp_path / "out.json")])

    assert code == 1
    assert "GiB needed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [["--rounds", "0"], ["--rounds", "x"], ["--messages", "5"], ["--only", "async,nonsense"], ["--only", ","]],
)
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments)

    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        f"2 1 0:5 / {tmp_path} rw shared:1 - xfs /dev/b rw\n"
        "3 1 0:6 / /nowhere rw - tmpfs tmpfs rw\n"
        "not a mount\n"
    )

    assert environment.file_system_of(tmp_path, mounts) == "xfs"
    assert environment.file_system_of(Path("/"), mounts) == "ext4"
    assert environment.file_system_of(tmp_path, tmp_path / "missing") == "unknown"
