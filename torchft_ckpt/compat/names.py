"""The places of torchft 0.2.0's names here, and advice for those that do not exist.

Every module of torchft's that is no test, benchmark or example can be imported here from the same place, and so can every public
name that is defined in it. What is here under the same name is not in the table. A module of torchft's that is no file here is
made of its part of the table when it is imported (a file that is added takes its place), and modules that are files ask the table
for names that they do not define. What does not exist is imported all the same, as scripts name process groups that they use on
other machines only. It says what to use instead when it is used.

This file knows names. It imports nothing that it names until that is asked for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torchft_ckpt.errors import AbsentNameError

PACKAGE = "torchft_ckpt"


class Here(NamedTuple):
    """The name is in another module of ours, maybe under another name."""

    module: str
    name: str = ""


class Value(NamedTuple):
    """A constant that means the same here."""

    value: str


class Instead(NamedTuple):
    """There is no such thing; what to do is said at its first use."""

    advice: str


Entry = Here | Value | Instead

_BABY = Instead(
    "it runs collectives in a process of its own; here NCCL is aborted within the process: use ProcessGroupNCCL, or"
    " ProcessGroupGloo on the CPU"
)
_XCCL = Instead(
    "there is no process group for Intel XPUs here; ProcessGroupGloo is for the CPU, ProcessGroupNCCL for CUDA"
)
_QUANTIZED = Instead("use Manager.allreduce(tensor, should_quantize=True), or 'int8' and 'fp8': it needs no Triton")
_FP8 = Instead("use Manager.allreduce(tensor, should_quantize='fp8'), which packs and unpacks by itself")
_OTEL = Instead(
    "use the loggers below 'torchft_ckpt' with a handler of your own; 'torchft_ckpt.manager' has the lines of steps"
)
_FLIGHT_RECORDER = Instead("it asks for no dumps; use torch.distributed's TORCH_NCCL_DUMP_ON_TIMEOUT")
_STORE_KEY = Instead(
    "a group's ranks find each other in another way here; nothing of it is in the store under this key"
)
_FUTURE = Instead(
    "use Manager.wrap_future(future, default, timeout); a collective's future ends by the timeout of its group"
)
_SLOW_STREAM = Instead("a process group's `timeout` ends collectives on a stream that does not complete")
_DUMMY = Instead("it runs Baby process groups in threads, and there are none here")
_BY_HAND = Instead(
    "use Manager (start_quorum, allreduce, should_commit): here the lighthouse decides each step once for all groups, and nobody"
    " votes by hand"
)
_MEMBERS = Instead(
    "ask the Manager (num_participants(), participating_rank(), current_step()), or the lighthouse's `status`, which names the"
    " groups"
)
_STREAMS = Instead("use torch.accelerator's streams and synchronize()")

TABLE: dict[str, dict[str, Entry]] = {
    "": dict.fromkeys(("ProcessGroupBabyNCCL", "ProcessGroupBabyXCCL", "ProcessGroupXCCL"), Here("process_group")),
    "_torchft": {
        **dict.fromkeys(
            ("LighthouseClient", "LighthouseServer", "ManagerClient", "ManagerServer"), Here("coordination")
        ),
        **dict.fromkeys(("Quorum", "QuorumMember", "QuorumResult", "Timestamp"), Here("coordination")),
        "lighthouse_main": Here("__main__", "main"),
    },
    "checkpointing._rwlock": {"RWLock": Here("compat.rwlock")},
    "checkpointing._serialization": {},
    "checkpointing.pg_transport": {"PGTransport": Here("checkpointing")},
    "collectives": dict.fromkeys(
        ("allocate_reduce_scatter_output", "allreduce_quantized", "get_padded_sizes", "reduce_scatter_quantized"),
        _QUANTIZED,
    ),
    "coordination": {
        **dict.fromkeys(("LighthouseClient", "ManagerClient", "ManagerServer"), _BY_HAND),
        **dict.fromkeys(("Quorum", "QuorumMember", "QuorumResult", "Timestamp"), _MEMBERS),
    },
    "futures": {
        "WATCHDOG_TIMEOUT_SEC": Value("TORCHFT_WATCHDOG_TIMEOUT_SEC"),
        **dict.fromkeys(("context_timeout", "future_timeout", "future_wait"), _FUTURE),
        "stream_timeout": _SLOW_STREAM,
    },
    "http": {},
    "local_sgd": {
        "USE_BUCKETIZATION_ENV": Value("TORCHFT_USE_BUCKETIZATION"),
        "extract_local_tensor": Here("outer.memory"),
    },
    "manager": {
        "CONNECT_TIMEOUT_SEC_ENV": Value("TORCHFT_CONNECT_TIMEOUT_SEC"),
        "IS_TRITON_AVAILABLE": _QUANTIZED,
        "MANAGER_ADDR_KEY": _STORE_KEY,
        "MANAGER_PORT_ENV": Value("TORCHFT_MANAGER_PORT"),
        "QUORUM_RETRIES_ENV": Value("TORCHFT_QUORUM_RETRIES"),
        "QUORUM_TIMEOUT_SEC_ENV": Value("TORCHFT_QUORUM_TIMEOUT_SEC"),
        "REPLICA_ID_KEY": _STORE_KEY,
        "TIMEOUT_SEC_ENV": Value("TORCHFT_TIMEOUT_SEC"),
        "TORCH_FR_DUMP_TEMP_FILE_ENV": Value("TORCH_FR_DUMP_TEMP_FILE"),
        "extract_trailing_digits": Instead("give each group a replica_id; nothing here reads a number out of it"),
        "get_timeout": Instead(
            "give Manager its timeouts; without them it reads the variables that torchft_ckpt.config lists"
        ),
    },
    "multiprocessing": {},
    "multiprocessing_dummy_context": {"DummyContext": _DUMMY, "get_context": _DUMMY},
    "optim": {"OptimizerWrapper": Here("optimizer")},
    "otel": {
        "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON": Value("TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON"),
        **dict.fromkeys(("TeeLogExporter", "main", "setup_logger", "shutdown"), _OTEL),
    },
    "parameter_server": {
        "ParameterServer": Instead(
            "it unpickles nothing but trusts whoever connects; make a ProcessGroupGloo for each session and configure it with"
            " (store address, session, rank, 2)"
        ),
    },
    "process_group": {
        "_ErrorSwallowingWork": Here("process_group.wrapper", "WorkOfFuture"),
        "ErrorSwallowingProcessGroupWrapper": Here("process_group.wrapper"),
        "FakeProcessGroupWrapper": Here("process_group.wrapper"),
        **dict.fromkeys(
            ("ProcessGroupBaby", "ProcessGroupBabyGloo", "ProcessGroupBabyNCCL", "ProcessGroupBabyXCCL"), _BABY
        ),
        "ProcessGroupXCCL": _XCCL,
        "TORCHFT_TRIGGER_FR_ON_ABORT": Value("TORCHFT_TRIGGER_FR_ON_ABORT"),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR": Value("TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
        "trigger_nccl_fr_trace_through_pipe": _FLIGHT_RECORDER,
    },
    "quantization": dict.fromkeys(
        (
            *("BLOCK_SIZE_T", "SCALE_DTYPE", "SCALE_DTYPE_BYTES", "SCALE_TL_DTYPE", "SCALE_TL_DTYPE_BYTES"),
            *("fused_dequantize_from_fp8", "fused_quantize_into_fp8", "fused_reduce_fp8"),
        ),
        _FP8,
    ),
    "torchcomms": {
        "ProcessGroupTorchComms": Instead("there is no process group over torchcomms; use ProcessGroupNCCL")
    },
    "utils": dict.fromkeys(("get_stream_context", "record_event", "synchronize"), _STREAMS),
    "work": {"_DummyWork": Here("process_group", "CompletedWork")},
}


class Absent:
    """Stands for a name of torchft's that does not exist here; using it raises.

    It may be imported, compared, named in annotations and given to isinstance (nothing is one). Calling it, deriving from it, and
    asking it for an attribute raise `AbsentNameError`.
    """

    def __init__(self, module: str, name: str, advice: str) -> None:
        self.__module__ = module
        self.__name__ = self.__qualname__ = name
        self.__doc__ = f"Not in {PACKAGE}: {advice}."
        self._advice = advice

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AbsentNameError(
            f"{self.__module__}.{self.__name__} is torchft's and is not here: {self._advice}", party=self.__name__
        )

    __call__ = __mro_entries__ = __getitem__ = __format__ = __enter__ = __iter__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __instancecheck__(self, instance: object) -> bool:
        return False

    def __subclasscheck__(self, other: type) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return typing.Union[self, other]  # noqa: UP007  # `|` is what is being defined

    def __ror__(self, other: Any) -> Any:
        return typing.Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}: not here>"


def lookup(module: str) -> Callable[[str], object]:
    """Return the `__getattr__` of a module of ours: what the table has under its name."""
    entries = TABLE.get(module.removeprefix(PACKAGE).removeprefix("."), {})

    def of_table(name: str) -> object:
        try:
            entry = entries[name]
        except KeyError:
            raise AttributeError(f"module {module!r} has no attribute {name!r}") from None
        value = _resolve(module, name, entry)
        setattr(sys.modules[module], name, value)
        return value

    return of_table


def _resolve(module: str, name: str, entry: Entry) -> object:
    match entry:
        case Here(where, other):
            return getattr(importlib.import_module(f"{PACKAGE}.{where}"), other or name)
        case Value(value):
            return value
        case Instead(advice):
            return Absent(module, name, advice)


class _TableModules:
    """Makes the modules of the table that are no files. It is asked last, after those that find files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.startswith(f"{PACKAGE}.") and fullname.removeprefix(f"{PACKAGE}.") in TABLE:
            return importlib.machinery.ModuleSpec(fullname, self)  # type: ignore[arg-type]  # a Loader by what it has
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        names = TABLE[spec.name.removeprefix(f"{PACKAGE}.")]
        module = types.ModuleType(spec.name, f"torchft's module of that name: {', '.join(names) or 'nothing public'}.")
        module.__dict__.update(__all__=list(names), __getattr__=lookup(spec.name), __dir__=lambda: sorted(names))
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to run."""


def install() -> None:
    """Let modules of the table be imported. May be called again."""
    if not any(isinstance(finder, _TableModules) for finder in sys.meta_path):
        sys.meta_path.append(_TableModules())
