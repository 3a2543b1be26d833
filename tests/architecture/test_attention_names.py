"""Attention functions are registered with transformers by name, for the whole process: no room may take another's name."""

from transformers import AttentionInterface

from understudy.engines.local import slots
from understudy.policy.forward import attention
from understudy.teacher.scoring import varlen


def test_a_teacher_in_the_trainers_process_leaves_the_students_attention_alone() -> None:
    varlen.register()
    known = AttentionInterface()
    assert known[attention.VARLEN] is attention.varlen_attention
    assert known[varlen.NAME] is varlen.varlen_attention
    assert known[slots.ATTENTION] is slots.decode_attention.attend
