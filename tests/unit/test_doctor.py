"""The doctor's findings, each guarded against being missed, and the fix it must name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from faser_sglang import doctor, plugin


def levels(checks) -> list[str]:
    return [check.level for check in checks]


def test_a_sound_environment_has_no_finding_but_ok():
    assert levels(doctor.check_python((3, 11, 0))) == ["ok"]
    assert levels(doctor.check_sglang(plugin.REQUIRED_SGLANG)) == ["ok"]
    assert levels(doctor.check_entry_points(_registered("faser", "faser_cpu"))) == ["ok", "ok"]
    assert levels(doctor.check_environment({"OMP_NUM_THREADS": "2"}, cores=2)) == []


def test_an_old_python_fails():
    assert levels(doctor.check_python((3, 10, 9))) == ["fail"]


@pytest.mark.parametrize("found", ["0.5.22", "0.5.23.post1", "none"])
def test_another_sglang_fails_and_names_the_install_command(found):
    (check,) = doctor.check_sglang(found)
    assert check.level == "fail"
    assert found in check.finding
    assert f"pip install sglang=={plugin.REQUIRED_SGLANG}" in check.fix


def test_missing_entry_points_fail_one_by_one():
    assert levels(doctor.check_entry_points(_registered("faser"))) == ["ok", "fail"]
    assert levels(doctor.check_entry_points(_registered())) == ["fail", "fail"]


def test_another_platform_fails_because_it_excludes_faser():
    (check,) = doctor.check_environment({"SGLANG_PLATFORM": "other"}, cores=2)
    assert (check.level, check.subject, check.fix) == ("fail", "SGLANG_PLATFORM", "unset it")


def test_fasers_own_platform_and_empty_variables_are_no_finding():
    environ = {"SGLANG_PLATFORM": "faser_cpu", "SGLANG_PLUGINS": " faser, faser_cpu"}
    assert levels(doctor.check_environment(environ, cores=2)) == []
    environ = {"SGLANG_PLATFORM": "", "SGLANG_PLUGINS": "", "OMP_NUM_THREADS": ""}
    assert levels(doctor.check_environment(environ, cores=2)) == []


def test_a_plugin_list_without_faser_fails_and_one_without_its_platform_warns():
    (check,) = doctor.check_environment({"SGLANG_PLUGINS": "other"}, cores=2)
    assert check.level == "fail"
    assert "faser,faser_cpu" in check.fix
    (check,) = doctor.check_environment({"SGLANG_PLUGINS": "faser"}, cores=2)
    assert check.level == "warn"


def test_thread_settings_that_starve_the_other_processes_warn():
    environ = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "8"}
    assert levels(doctor.check_environment(environ, cores=2)) == ["warn", "warn"]


def test_a_drafter_that_does_not_fit_fails_with_the_reason():
    def refuse(model: str, draft: str) -> None:
        raise ValueError(f"{draft} has another\n vocabulary than {model}")

    checks = doctor.guarded("drafter", doctor.check_pair("target", "draft", refuse), "another")
    assert list(checks) == [
        doctor.Check("fail", "drafter", "draft has another vocabulary than target", "another")
    ]


def test_what_the_fit_only_logs_is_a_warning():
    def short(model: str, draft: str) -> None:
        logging.getLogger("faser_sglang.validation").warning("the context is %d tokens", 512)

    shown = [str(check) for check in doctor.check_pair("target", "draft", short)]
    assert shown[0].startswith("warn drafter: the context is 512 tokens -> ")
    assert shown[1] == "ok   drafter: draft fits target"


def test_main_fails_only_for_a_failure(monkeypatch, capsys):
    found = [doctor.Check("ok", "python", "3.11"), doctor.Check("warn", "memory", "1 GiB", "more")]
    monkeypatch.setattr(doctor, "run_checks", lambda model, draft: iter(found))
    assert doctor.main([]) == 0
    found.append(doctor.Check("fail", "sglang", "none", "install it"))
    assert doctor.main([]) == 1
    assert capsys.readouterr().out.endswith("fail sglang: none -> install it\n")


def _registered(*names: str):
    return lambda group: [SimpleNamespace(name=name) for name in names]
