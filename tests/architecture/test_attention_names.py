"""Attention functions are registered with transformers by name, for the whole process: no room may take another's name."""

import subprocess
import sys

REGISTERS = """
from understudy.engines.local import slots
from understudy.policy.forward import attention
from understudy.teacher.scoring import varlen
from transformers import AttentionInterface

varlen.register()
known = AttentionInterface()
assert known[attention.VARLEN] is attention.varlen_attention, known[attention.VARLEN]
assert known[varlen.NAME] is varlen.varlen_attention
assert known[slots.ATTENTION] is slots.decode_attention.attend
"""


def test_a_teacher_in_the_trainers_process_leaves_the_students_attention_alone() -> None:
    found = subprocess.run([sys.executable, "-c", REGISTERS], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
