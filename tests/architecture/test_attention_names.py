"""Attention functions are registered with transformers by name for the whole process, so names must not collide."""

from transformers import AttentionInterface

from understudy.engines.local import slots
from understudy.policy.forward import attention
from understudy.teacher.scoring import varlen


def test_student_teacher_and_engine_register_their_attention_under_different_names() -> None:
    varlen.register()
    known = AttentionInterface()
    assert known[attention.VARLEN] is attention.varlen_attention
    assert known[varlen.NAME] is varlen.varlen_attention
    assert known[slots.ATTENTION] is slots.decode_attention.attend
