"""`[student]` and `[teachers.NAME]`: the models of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from understudy.config.base import Section

DType = Literal["float32", "bfloat16", "float16"]


class StudentConfig(Section):
    model: str
    """Hub id or folder of the student."""
    revision: str | None = None
    """Pinned hub revision; needed when `trust_remote_code` is on."""
    trust_remote_code: bool = False
    dtype: DType = "float32"
    """Of the weights in forward and backward; masters stay float32."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _pinned_code(self) -> StudentConfig:
        if self.trust_remote_code and not self.revision:
            raise ValueError("trust_remote_code = true runs code from the hub: pin it with `revision`")
        return self


class TeacherConfig(Section):
    model: str
    """Hub id or folder of the teacher."""
    key: str | None = None
    """Rows whose routing column has this value; one teacher needs no key."""
    replicas: Annotated[int, Field(ge=0)] = 1
    """How many server processes hold this teacher."""
    placement: str = "standalone"
    """`pool` (a slice of a named pool), `standalone` (own processes and devices) or `external` (`urls`)."""
    urls: list[str] = Field(default=[])
    """Running scoring servers (`external` only)."""
    token_env: str | None = None
    """Environment variable that holds the bearer token of external servers."""
    dtype: DType = "float32"
    device: str = "auto"
    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of one replica."""
    ports: list[int] = Field(default=[])
    """Fixed loopback ports, one per replica; empty lets the system choose."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = 16384
    """Tokens of one forward of a replica."""
    deadline_seconds: Annotated[float, Field(gt=0)] = 60.0
    """After this long without an answer a request is tried on another replica."""
    revision: str | None = None
    trust_remote_code: bool = False

    @field_validator("placement")
    @classmethod
    def _known_placement(cls, placement: str) -> str:
        if placement == "colocate":
            raise ValueError(
                "refused: a teacher that shares the student's memory by taking turns is slept and woken every step, and "
                "woke up with wrong weights in other systems; use 'standalone', 'pool' or 'external'"
            )
        if placement not in ("pool", "standalone", "external"):
            raise ValueError("expected 'pool', 'standalone' or 'external'")
        return placement

    @model_validator(mode="after")
    def _placed(self) -> TeacherConfig:
        if self.placement == "external":
            if not self.urls:
                raise ValueError(
                    "placement = 'external' needs `urls`, the addresses of running scoring servers"
                )
        elif self.replicas < 1:
            raise ValueError(f"replicas = {self.replicas}: a teacher needs at least 1 replica")
        elif self.urls:
            raise ValueError("`urls` belong to placement = 'external'")
        if self.ports and len(self.ports) != self.replicas:
            raise ValueError(
                f"{len(self.ports)} ports for {self.replicas} replicas; give one per replica, or none"
            )
        if self.trust_remote_code and not self.revision:
            raise ValueError("trust_remote_code = true runs code from the hub: pin it with `revision`")
        return self
