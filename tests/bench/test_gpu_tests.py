"""The stage `gpu_tests`: what is read of pytest, and what is kept where it is ended."""

from __future__ import annotations

from pathlib import Path

from fasteagle.bench.gpu_check import gpu_tests

JUNIT = """<testsuites><testsuite>
<testcase name="a" time="1.5"/>
<testcase name="b" time="0.5"><skipped message="no device"/></testcase>
<testcase name="c" time="0"><failure message="assert 1 == 2&#10;more">text</failure></testcase>
<testcase name="d" time="0"><error message=""/></testcase>
</testsuite></testsuites>"""


def test_a_report_of_pytest(tmp_path):
    path = tmp_path / "report.xml"
    path.write_text(JUNIT)
    counts, failures, seconds = gpu_tests.read_junit(path)
    assert counts == {"passed": 1, "skipped": 1, "failed": 2}
    assert failures == ["c: assert 1 == 2", "d: failed"] and seconds == 2.0
    assert gpu_tests.read_junit(tmp_path / "none.xml")[0] == {
        "passed": 0,
        "skipped": 0,
        "failed": 0,
    }


def test_a_file_whose_tests_cannot_be_collected_is_a_failure(tmp_path):
    path = tmp_path / "tests" / "test_x.py"
    path.parent.mkdir()
    path.write_text("import a_package_that_is_absent\n@pytest.mark" + ".gpu\n")
    assert gpu_tests.marked_files(tmp_path) == [path]
    found = gpu_tests.run_file(tmp_path, path, 60)
    assert found["failed"] == 1 and len(found["failures"]) == 1


HANGING = """
import time, pytest
pytestmark = pytest.mark.MARK  # this file itself has no tests for a device

@pytest.mark.parametrize("what", ["one thing", "two"])
def test_good(what):
    pass

def test_bad():
    assert 1 == 2

def test_not_here():
    pytest.skip("no device")

def test_hangs():
    time.sleep(60)

def test_after():
    pass
"""


def written(folder, code):
    """A test file in `folder`, with the mark."""
    path = folder / "tests" / "test_x.py"
    path.parent.mkdir()
    path.write_text(code.replace("MARK", "gpu"))
    return path


def test_what_a_file_reported_before_its_time_was_over_is_kept(tmp_path, dry, monkeypatch):
    path = written(tmp_path, HANGING)
    assert gpu_tests.marked_files(tmp_path) == [path]
    assert not gpu_tests.marked_files(Path(__file__).parent), "these need no device"
    found = gpu_tests.run_file(tmp_path, path, 12)
    assert {name: found[name] for name in gpu_tests.COUNTS} == {
        "passed": 2,
        "skipped": 1,
        "failed": 1,
    }
    assert found["failures"] == ["not done after 12 s, in test_hangs", "test_bad: failed"]
    assert "test_hangs" in found["tail"][-1] and len(found["tail"]) <= gpu_tests.TAIL
    monkeypatch.setattr(gpu_tests, "checkout", lambda: tmp_path)
    monkeypatch.setattr(gpu_tests, "run_file", lambda *given: found)
    code, reported = dry("gpu_tests")
    assert code == 1 and reported["problems"][0].startswith("test_x.py: not done after 12 s")
    assert any(line.startswith("test_x.py said last: ") for line in reported["lines"])
    assert reported["lines"][-1] == "2 passed, 1 skipped, 1 failed"
    assert reported["tables"][0]["rows"] == [["test_x.py", 2, 1, 1, f"{found['seconds']:.0f}"]]


def test_a_process_that_dies_has_reported_what_it_had(tmp_path):
    path = written(tmp_path, HANGING.replace("time.sleep(60)", "import os; os._exit(9)"))
    found = gpu_tests.run_file(tmp_path, path, 60)
    assert found["failures"] == ["exit code 9, in test_hangs", "test_bad: failed"]
    assert found["passed"] == 2 and found["seconds"] < 60
