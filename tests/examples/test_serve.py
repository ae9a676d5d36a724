"""`examples/serve.py`: servers of both encodings answer with the last version, and int8 rows rank as well."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.places import EXAMPLES, environment


@pytest.mark.slow
def test_servers_follow_the_trainer() -> None:
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--publish-every", "100"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment()).stdout
    reports = dict(re.findall(r"^(\w+): version 4, AUC (0\.\d+)", output, re.MULTILINE))
    assert reports.keys() == {"float32", "int8"}
    assert float(reports["float32"]) > 0.75
    assert abs(float(reports["float32"]) - float(reports["int8"])) < 0.001
