"""The declarations of kernels, and the header that the build makes of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.rule_references import CATCH_UPS, REFERENCES
from tierbed.engine.optim import kernel
from tierbed.engine.optim.rule import load_rules

pytestmark = pytest.mark.optimizer


def test_the_build_reads_the_kernels_without_any_package(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", kernel.__file__, str(tmp_path / "rules.h")]
    subprocess.run(command, check=True)
    assert (tmp_path / "rules.h").read_text() == kernel.generate_header()


def test_what_is_read_from_the_files_is_what_they_declare() -> None:
    declared = {found.name: found for found in kernel.find_kernels()}
    assert declared == {rule.kernel.name: rule.kernel for rule in load_rules()}
    assert list(declared) == sorted(declared)


def test_every_kernel_has_a_reference_and_one_for_missed_steps() -> None:
    assert {rule.kernel.name for rule in load_rules()} == set(REFERENCES)
    catching_up = {"catch_up_adam", "catch_up_adam_l2", "catch_up_adamw"}
    assert {rule.kernel.name for rule in load_rules() if rule.kernel.catch_up} == set(CATCH_UPS) == catching_up


def test_a_kernel_that_is_not_made_of_literals_names_its_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("NAME = 'x'\n\nRULE = RuleKernel(name=NAME, hyperparams='', element_body='')\n")
    with pytest.raises(ValueError, match=r"other\.py, line 3: a kernel's arguments must be literals"):
        kernel.find_kernels(tmp_path)
