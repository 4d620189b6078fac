import enum

class DType(enum.Enum):
    float32 = 0
    float16 = 1
    bfloat16 = 2

class AttentionProblem:
    batch: int
    q_len: int
    kv_len: int
    q_heads: int
    kv_heads: int
    head_dim: int
    layers: int
    q_dtype: DType
    kv_dtype: DType
    scale: float
    chunk_invariant: bool
    sliding_window: int
    logits_soft_cap: float
    has_starts: bool
    has_sinks: bool
    def __init__(self) -> None: ...

max_kv_len: int
ffi_api_version: tuple[int, int]
cuda_architectures: str | None

def registrations() -> dict[str, tuple[object, object, object]]: ...
def kernel_names(platform: str) -> list[str]: ...
def refusal(kernel: str, problem: AttentionProblem, compute_capability: int) -> str: ...
def cpu_isa() -> str: ...
