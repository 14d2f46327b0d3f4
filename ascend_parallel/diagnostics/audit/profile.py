"""A rank's profile: its collectives, what it computed, its steps, and what launched them, whoever recorded it.

torch.profiler's traces of GPUs have kernels with the category "kernel"; those of CPUs have operators, and gloo's
collectives as annotations on gloo's threads. Ascend's traces have processes "Ascend Hardware" and "Communication",
which was "HCCL" before.
"""

from __future__ import annotations

import functools
import re
from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ascend_parallel.diagnostics.audit.events import ProfileError, RawEvent, TraceFile, nanoseconds
from ascend_parallel.diagnostics.intervals import Intervals, union, without
from ascend_parallel.ops.collectives import collective_of_tag

FORWARD, BACKWARD = "forward", "backward"
MATMUL, BESIDE, COPY = "matmul", "beside", "copy"

# Operations by what their names contain, whatever the library: NCCL, RCCL, gloo, HCCL, torch's c10d.
# Before torch 2.4 a trace has no name of a collective but its kernel's, and NCCL's SendRecv also runs all-to-alls.
EXCHANGE = "exchange"
# A copy from one device to another, by which symmetric memory gathers.
PEER_COPY = "peer_copy"
_BETWEEN_DEVICES = re.compile(r"^memcpy ptop", re.IGNORECASE)
OPERATIONS = (
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce", re.IGNORECASE)),
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all_gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all_to_all", re.compile(r"all_?to_?all|deep_ep", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
    (EXCHANGE, re.compile(EXCHANGE)),
    (PEER_COPY, _BETWEEN_DEVICES),
    ("send_recv", re.compile(r"send|recv|receive", re.IGNORECASE)),
    ("other", re.compile(r"gather|scatter|reduce|barrier", re.IGNORECASE)),
)
_COMMUNICATION = re.compile(r"nccl|rccl|^hcom_|^allreduce_|^mscclpp", re.IGNORECASE)
# Kernels of collectives outside a library: vLLM's and SGLang's custom all-reduce, torch's symmetric memory, all-reduces
# with a norm of flashinfer and TensorRT-LLM, ROCm's quick reduce, DeepEP's dispatch and combine.
_CUSTOM = re.compile(
    r"cross_device_reduce|all_?reduce_?(?:fusion|prototype|kernel)|(?:one|two)_?shot\w*all_?reduce"
    r"|multimem_\w*(?:reduce|gather)|quick_?reduce|deep_ep::",
    re.IGNORECASE,
)
_MATMUL = re.compile(
    r"gemm|gemv|matmul|cutlass.*(?:mm|tensorop)|^Cijk|wgrad|nvjet|^aten::(?:mm|addmm|bmm|baddbmm|_scaled_mm)$",
    re.IGNORECASE,
)
_COPY = re.compile(r"^(?:mem(?:cpy|set)|dma)", re.IGNORECASE)
# What a trace of CPUs computes with; others only call these, or wait.
_ATEN = "aten::"
_GLOO = re.compile(r"^(?:gloo|mpi|ccl|ucc):", re.IGNORECASE)
# gloo's sends and receives, by the operators that issue them, whose arguments are tensors, group, peer and tag.
_MESSAGE = re.compile(r"^gloo:(?:send|recv)$")
_C10D = "c10d::"
_ISSUES = {"c10d::send": "gloo:send", "c10d::recv_": "gloo:recv"}
_STEP = re.compile(r"^ProfilerStep#?\d+")
_BACKWARD = ("autograd::engine::evaluate_function", "backward")
_ITEM_BYTES = {
    "float": 4,
    "int": 4,
    "long": 8,
    "double": 8,
    "half": 2,
    "bfloat16": 2,
    "c10::bfloat16": 2,
    "c10::half": 2,
}
_ITEM_BYTES |= {
    "char": 1,
    "byte": 1,
    "unsigned char": 1,
    "signed char": 1,
    "bool": 1,
    "fp16": 2,
    "bf16": 2,
    "bfp16": 2,
    "fp32": 4,
}
_ITEM_BYTES |= {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "fp64": 8,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
}
ASCEND, COMMUNICATION = "Ascend Hardware", ("Communication", "HCCL")


@dataclass(frozen=True)
class ProcessGroup:
    """The group of a collective as the profile names it; all fields are empty where it says nothing.

    ranks
        The ranks of the group, or empty.
    size
        Their number, or 0.
    """

    name: str = ""
    description: str = ""
    ranks: tuple[int, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective from `begin` to `end`, in ns.

    nbytes
        Bytes that this rank puts in; None where the profile does not say.
    direction
        "forward" or "backward", by where the host launched it; "" where the profile has no autograd.
    launched
        When the host launched it, or None.
    """

    begin: int
    end: int
    operation: str
    name: str
    group: ProcessGroup
    nbytes: float | None = None
    direction: str = ""
    launched: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A matmul, another computation or a copy, from `begin` to `end`, in ns; `launched`: when the host launched it."""

    begin: int
    end: int
    kind: str
    name: str
    launched: int | None = None


Timed = TypeVar("Timed", Collective, Kernel)
# pid, tid, begin, end, name and the arguments that matter, of an event of a device or of gloo
_Span = tuple[Any, Any, int, int, str, dict[str, Any]]


@dataclass
class RankProfile:
    """What a profile says of one rank, with times in ns, sorted by begin.

    steps
        Begin and end of each step, where the program marked them.
    device
        "gpu", "npu" or "cpu": where the computation ran.
    seen
        How often each name of an operator or kernel stands in the profile, of those that `clues` asks for.
    notes
        What a reader of the result has to know about this file.
    """

    path: Path
    rank: int | None
    world_size: int | None
    device: str
    collectives: list[Collective]
    kernels: list[Kernel]
    steps: list[tuple[int, int]]
    launches: list[int]
    seen: Mapping[str, int]
    notes: list[str] = field(default_factory=list)
    _busy: dict[tuple[str, ...], Intervals] = field(default_factory=dict, repr=False)

    @property
    def span(self) -> tuple[int, int]:
        """Return begin of the first and end of the last event of the device, or of the marked steps on a CPU."""
        events: list[Kernel | Collective] = [*self.kernels, *self.collectives]
        begin, end = min(event.begin for event in events), max(event.end for event in events)
        if self.device == "cpu" and self.steps:
            return min(begin, self.steps[0][0]), max(end, self.steps[-1][1])
        return begin, end

    @property
    def step_count(self) -> int:
        """The number of steps; 1 where the profile marks none."""
        return len(self.steps) or 1

    def busy(self, *kinds: str) -> Intervals:
        """Return when a kernel of one of these kinds ran; of all computation without kinds."""
        kinds = kinds or (MATMUL, BESIDE)
        if kinds not in self._busy:
            self._busy[kinds] = union((one.begin, one.end) for one in self.kernels if one.kind in kinds)
        return self._busy[kinds]


def read_profile(
    path: Path, clues: Iterable[str] = (), progress: Callable[[str], None] = lambda _: None
) -> RankProfile:
    """Read the trace of one rank.

    clues
        Parts of names that are counted wherever they stand in the trace.

    Raises `ProfileError` for a file that is no trace, or has nothing that ran.
    """
    trace = TraceFile(path, progress)
    reader = _TraceReader(tuple(clues))
    for event in trace.events():
        try:
            reader.take(event)
        except ProfileError as error:
            raise ProfileError(f"{path}: {error}") from error
    profile = reader.profile(path, trace.about)
    if trace.cut_off:
        profile.notes.append(trace.cut_off)
    return profile


class _HostOperators:
    """The host's operators, in 24 bytes each."""

    def __init__(self) -> None:
        self.threads: dict[tuple[Any, Any], int] = {}
        self._names: dict[str, int] = {}
        self._begins, self._ends = array("q"), array("q")
        self._of_thread, self._of_name = array("i"), array("i")

    def append(self, thread: tuple[Any, Any], begin: int, end: int, name: str) -> None:
        """Add an operator of a process and thread."""
        self._begins.append(begin)
        self._ends.append(end)
        self._of_thread.append(self.threads.setdefault(thread, len(self.threads)))
        self._of_name.append(self._names.setdefault(name, len(self._names)))

    def clear(self) -> None:
        """Forget the operators, but not the threads."""
        for column in (self._begins, self._ends, self._of_thread, self._of_name):
            del column[:]

    def __len__(self) -> int:
        return len(self._begins)

    def __iter__(self) -> Iterator[tuple[tuple[Any, Any], int, int, str]]:
        threads, names = list(self.threads), list(self._names)
        columns = zip(self._of_thread, self._begins, self._ends, self._of_name, strict=True)
        for thread, begin, end, name in columns:
            yield threads[thread], begin, end, names[name]


class _TraceReader:
    """Sorts a trace's events as they come; matches launches, threads and processes when all are there."""

    def __init__(self, clues: tuple[str, ...]) -> None:
        self._clues = clues
        self._seen: dict[str, int] = defaultdict(int)
        self._clued: dict[str, str | None] = {}
        self._names: dict[str, str] = {}  # one object for each name
        self._processes: dict[Any, str] = {}
        self._threads: dict[tuple[Any, Any], str] = {}
        self._steps: list[tuple[int, int]] = []
        self._autograd: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        self._launches: dict[Any, tuple[int, Any]] = {}
        self._flows: dict[Any, tuple[int, Any]] = {}
        self._arrivals: dict[tuple[Any, Any, int], Any] = {}
        self._gpu: list[_Span] = []
        self._host = _HostOperators()
        self._gloo: list[_Span] = []
        self._other: list[_Span] = []
        self._issues: dict[tuple[Any, str], list[tuple[int, int, str, int]]] = defaultdict(list)
        self._calls: list[tuple[int, str, frozenset[int]]] = []

    def take(self, event: RawEvent) -> None:
        """Keep what the profile needs of an event."""
        phase = event.get("ph")
        if phase == "M":
            self._take_name(event)
        elif phase in ("s", "f"):
            self._take_flow(event, phase)
        elif phase == "X" and "dur" in event and "ts" in event:
            self._take_span(event)

    def _take_name(self, event: RawEvent) -> None:
        name = str((event.get("args") or {}).get("name", ""))
        if event.get("name") == "process_name":
            self._processes[event.get("pid")] = name
        elif event.get("name") == "thread_name":
            self._threads[event.get("pid"), event.get("tid")] = name

    def _take_flow(self, event: RawEvent, phase: str) -> None:
        """Keep an arrow from the host to a device: Ascend's traces tell launches so."""
        if event.get("cat") not in ("async_npu", "HostToDevice", "async_task_queue"):
            return
        time, key = nanoseconds(event["ts"]), event.get("id")
        if phase == "s":
            self._flows[key] = (time, event.get("tid"))
        else:
            self._arrivals[event.get("pid"), event.get("tid"), time] = key

    def _take_span(self, event: RawEvent) -> None:
        name = str(event.get("name", ""))
        name = self._names.setdefault(name, name)
        begin = nanoseconds(event["ts"])
        end = begin + max(nanoseconds(event["dur"]), 0)
        category = str(event.get("cat") or "").lower()
        pid, tid, arguments = event.get("pid"), event.get("tid"), event.get("args") or {}
        self._count(name)
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            self._gpu.append(
                (pid, tid, begin, end, name, _kept(arguments) if communicates(name) else _launch(arguments))
            )
        elif category in ("cuda_runtime", "cuda_driver", "hip_runtime", "runtime") and "correlation" in arguments:
            self._launches[arguments["correlation"]] = (begin, tid)
        elif _GLOO.match(name):
            self._gloo.append((pid, tid, begin, end, name, _kept(arguments)))
        elif _STEP.match(name) and not category.startswith("gpu_"):
            self._steps.append((begin, end))
        elif category in ("cpu_op", "operator"):
            if name.startswith(_BACKWARD[0]):
                self._autograd[tid].append((begin, end))
            elif name.startswith(_ATEN):
                self._host.append((pid, tid), begin, end, name)
            elif name.startswith(_C10D):
                self._take_issue(tid, begin, end, name, arguments)
        elif not category or category == "hccl":
            self._other.append((pid, tid, begin, end, name, _kept(arguments)))

    def _take_issue(self, tid: Any, begin: int, end: int, name: str, arguments: Mapping[str, Any]) -> None:
        """Keep when the program issued a collective, and peer and tag of a send or receive (with record_shapes)."""
        inputs = list(arguments.get("Concrete Inputs") or ())
        if name not in _ISSUES:
            dims = list(arguments.get("Input Dims") or ())[:2]  # those of what is put in, and of what comes out
            self._calls.append((begin, _operation(name), frozenset(_elements(shape) for shape in dims)))
        elif len(inputs) > 3 and (tag := _whole_number(inputs[3])) is not None:
            self._issues[tid, _ISSUES[name]].append((begin, end, str(inputs[2]), tag))

    def _count(self, name: str) -> None:
        if name not in self._clued:
            self._clued[name] = next((clue for clue in self._clues if clue in name), None)
        clue = self._clued[name]
        if clue is not None:
            self._seen[clue] += 1

    def profile(self, path: Path, about: Mapping[str, Any]) -> RankProfile:
        """Return the rank's profile; raises `ProfileError` if nothing ran on a device or in operators."""
        ascend = {pid for pid, name in self._processes.items() if name.startswith(ASCEND)}
        if ascend:
            device, collectives, kernels = "npu", self._hcom(), self._ascend_kernels(ascend)
        elif self._gpu:
            device, collectives, kernels = "gpu", self._nccl(), self._gpu_kernels()
        else:
            device, collectives, kernels = "cpu", self._of_gloo(), self._operators()
        if not kernels and not collectives:
            raise ProfileError(f"{path}: a trace without a kernel, an operator or a collective: nothing to audit")
        distributed = about.get("distributedInfo") or {}
        steps = sorted(set(self._steps))
        collectives = _of_steps(collectives, steps, device)
        kernels = _of_steps(kernels, steps, device)
        events: list[Kernel | Collective] = [*kernels, *collectives]
        if not any(event.end > event.begin for event in events):
            raise ProfileError(f"{path}: nothing that its {len(steps)} steps launched took time: nothing to audit")
        return RankProfile(
            path=path,
            rank=_whole_number(distributed.get("rank")),
            world_size=_whole_number(distributed.get("world_size")),
            device=device,
            collectives=sorted(collectives, key=lambda collective: collective.begin),
            kernels=sorted(kernels, key=lambda kernel: kernel.begin),
            steps=steps,
            launches=sorted(time for time, _ in (self._launches or self._flows).values()),
            seen=dict(self._seen),
            notes=self._notes(device),
        )

    def _notes(self, device: str) -> list[str]:
        """Say what makes this profile another than that of one rank with its device."""
        devices = {pid for pid, *_ in (self._gpu if device == "gpu" else self._host.threads if device == "cpu" else ())}
        notes = []
        if len(devices) > 1:
            what = "GPUs" if device == "gpu" else "processes"
            notes.append(
                f"the trace is of {len(devices)} {what}, added up as if they were one: give a file for each rank"
            )
        if device == "cpu" and any(name.startswith("nccl:") for name in self._names):
            notes.append("NCCL ran, but no kernel was recorded: add ProfilerActivity.CUDA to the profiler's activities")
        return notes

    def _directions(self) -> _Windows:
        """Return the windows of backward; a host with operators and no backward runs forward alone, as servers do."""
        return _Windows(self._autograd or ({None: []} if self._host else {}))

    def _gpu_kernels(self) -> list[Kernel]:
        return [
            Kernel(begin, end, _kind(name), name, self._launched(arguments)[0])
            for _, _, begin, end, name, arguments in self._gpu
            if not communicates(name)
        ]

    def _nccl(self) -> list[Collective]:
        in_backward = self._directions()
        found = []
        for _, tid, begin, end, name, arguments in self._gpu:
            if communicates(name):
                stated = str(arguments.get("Collective name") or name.replace("SendRecv", EXCHANGE))
                group = _group(arguments, f"stream {arguments.get('stream', tid)}")
                direction = in_backward.direction(*self._launched(arguments))
                operation, launched = _operation(stated), self._launched(arguments)[0]
                found.append(Collective(begin, end, operation, name, group, _bytes(arguments), direction, launched))
        return found

    def _launched(self, arguments: Mapping[str, Any]) -> tuple[int | None, Any]:
        return self._launches.get(arguments.get("correlation"), (None, None))

    def _of_gloo(self) -> list[Collective]:
        """Return gloo's collectives; they run on its own threads, so the main thread's backward tells directions.

        This package's gathers and reduce-scatters on gloo are sends and receives: the sends and receives of a chunk
        are one collective.
        """
        main = [window for windows in self._autograd.values() for window in windows]
        in_backward = _Windows({None: main})
        exchanges, others = self._exchanges()
        whole = [(one.begin, one.end, one.operation, one.name, one.nbytes) for one in exchanges]
        begins = self._issued(others)
        whole += [
            (begin, end, _operation(name), name, _bytes(given))
            for begin, (*_, end, name, given) in zip(begins, others, strict=True)
        ]
        return [
            Collective(begin, end, operation, name, ProcessGroup(), size, in_backward.direction(begin, None))
            for begin, end, operation, name, size in whole
        ]

    def _issued(self, events: Sequence[_Span]) -> list[int]:
        """Return when each of gloo's collectives began: its issue or, if later, when its thread was free.

        An event begins when the thread has woken up. The calls are paired by operation and size, the first with the
        first: a group's threads take them in order. A collective without a call begins where its event does.
        """
        calls: dict[tuple[str, int | None], deque[int]] = defaultdict(deque)
        for number, (_, operation, sizes) in enumerate(sorted(self._calls, key=lambda call: call[0])):
            for size in sizes or (None,):
                calls[operation, size].append(number)
        by_begin = [begin for begin, *_ in sorted(self._calls, key=lambda call: call[0])]
        taken: set[int] = set()
        free: dict[Any, int] = {}
        begins = []
        for _, tid, begin, end, name, arguments in events:
            dims = arguments.get("Input Dims") or ()
            waiting = calls[_operation(name), _elements(dims[0]) if dims else None]
            while waiting and waiting[0] in taken:
                waiting.popleft()
            issued = begin
            if waiting and by_begin[waiting[0]] <= begin and not _MESSAGE.match(name):
                taken.add(waiting[0])
                issued = by_begin[waiting.popleft()]
            begins.append(min(max(issued, free.get(tid, issued)), begin))
            free[tid] = end
        return begins

    def _exchanges(self) -> tuple[list[_Exchange], list[_Span]]:
        """Return the exchanges of this package, and gloo's other events.

        An exchange runs from its first send, whenever its receives were posted, until all its sends and receives have
        been waited for. Chunks of a call share a tag: the n-th send to a peer and the n-th receive from it are of the
        n-th chunk.
        """
        exchanges: dict[tuple[int, int], _Exchange] = {}
        numbers: dict[tuple[str, str, int], int] = defaultdict(int)
        others = []
        issues = {key: sorted(found) for key, found in self._issues.items()}
        for event in sorted(self._gloo, key=lambda event: event[2]):
            _, tid, begin, end, name, arguments = event
            peer, tag = _issue_at(issues.get((tid, name), []), begin) if _MESSAGE.match(name) else ("", -1)
            operation = collective_of_tag(tag)
            if operation is None:
                others.append(event)
                continue
            number = numbers[name, peer, tag]
            numbers[name, peer, tag] += 1
            exchange = exchanges.setdefault((tag, number), _Exchange(operation))
            exchange.take(begin, end, _bytes(arguments), sent=name == "gloo:send")
        return [exchange for exchange in exchanges.values() if exchange.sends], others

    def _operators(self) -> list[Kernel]:
        """Return torch's operators on CPUs, without those that run inside a collective on its own thread."""
        inside: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for pid, tid, begin, end, name, _ in self._gloo:
            if not _MESSAGE.match(name):  # the program's own thread issues it, and goes on
                inside[pid, tid].append((begin, end))
        windows = _Windows(inside)
        kernels: list[Kernel] = []
        outer: dict[Any, Kernel] = {}  # of each thread the last that is no matmul: what it calls adds no time
        for thread, begin, end, name in self._host:
            kind, around = _kind(name), outer.get(thread)
            if windows.contain(begin, thread):
                continue
            if kind == BESIDE and around is not None and around.begin <= begin and end <= around.end:
                continue
            kernels.append(Kernel(begin, end, kind, name))
            if kind == BESIDE:
                outer[thread] = kernels[-1]
        self._host.clear()  # a trace of a gigabyte has millions
        return kernels

    def _ascend_kernels(self, ascend: set[Any]) -> list[Kernel]:
        """Return the kernels of a device's streams; the steps of a collective on them have names of their own."""
        found = []
        for pid, tid, begin, end, name, arguments in self._other:
            if pid in ascend and not _of_a_collective(name, arguments):
                launched = self._flows.get(self._arrivals.get((pid, tid, begin)), (None, None))[0]
                found.append(Kernel(begin, end, _kind(name), name, launched))
        return found

    def _hcom(self) -> list[Collective]:
        """Return the collectives of the process "Communication", whose threads "Group ..." have one line for each."""
        processes = {pid for pid, name in self._processes.items() if name in COMMUNICATION}
        in_backward = self._directions()
        found = []
        for pid, tid, begin, end, name, arguments in self._other:
            thread = self._threads.get((pid, tid), "")
            if pid not in processes or not thread.startswith("Group"):
                continue
            launched = self._flows.get(self._arrivals.get((pid, tid, begin)), (None, None))
            group = ProcessGroup(thread.removeprefix("Group ").removesuffix(" Communication").strip())
            direction = in_backward.direction(*launched)
            size = _bytes(arguments)
            found.append(Collective(begin, end, _operation(name), name, group, size, direction, launched[0]))
        return found


@dataclass
class _Exchange:
    """A gather or reduce-scatter of a chunk by sends and receives on gloo; times in ns, `sent` in bytes."""

    operation: str
    begin: int = 0
    end: int = 0
    sends: int = 0
    sent: float | None = 0.0

    def take(self, begin: int, end: int, nbytes: float | None, *, sent: bool) -> None:
        """Add a send, or a receive, which may have been posted long before its chunk was there."""
        self.end = max(self.end, end)
        if sent:
            self.begin = min(self.begin, begin) if self.sends else begin
            self.sends += 1
            self.sent = None if nbytes is None or self.sent is None else self.sent + nbytes

    @property
    def name(self) -> str:
        """What the collective is in the profile."""
        return f"{self.operation} by sends"

    @property
    def nbytes(self) -> float | None:
        """Bytes that the rank puts in: a gather sends the same to each peer, a scatter keeps a part."""
        if self.sent is None:
            return None
        return self.sent / self.sends if self.operation == "all_gather" else self.sent / self.sends * (self.sends + 1)


def _issue_at(issues: Sequence[tuple[int, int, str, int]], time: int) -> tuple[str, int]:
    """Return peer and tag of the operator that was running at a time; "" and -1 if none was."""
    index = bisect_right(issues, time, key=lambda issue: issue[0]) - 1
    if index < 0 or issues[index][1] < time:
        return "", -1
    return issues[index][2:]


class _Windows:
    """Spans of time on each of the host's threads: of backward, or of collectives."""

    def __init__(self, spans: Mapping[Any, list[tuple[int, int]]]) -> None:
        self._windows = {tid: union(windows) for tid, windows in spans.items()}
        self._begins = {tid: [begin for begin, _ in windows] for tid, windows in self._windows.items()}

    def contain(self, time: int, tid: Any) -> bool:
        """Tell whether a time lies in one of a thread's windows."""
        index = bisect_right(self._begins.get(tid, []), time) - 1
        return index >= 0 and time < self._windows[tid][index][1]

    def direction(self, time: int | None, tid: Any) -> str:
        """Return the direction of what a thread launched at a time; "" if either is not known."""
        if time is None or not self._windows:
            return ""
        return BACKWARD if self.contain(time, tid) else FORWARD


def _of_steps(events: list[Timed], steps: Sequence[tuple[int, int]], device: str) -> list[Timed]:
    """Return the events that the marked steps launched; on a CPU, those that began in them; all if no step is marked.

    torch's traces of GPUs begin with kernels that were launched before the recording, and have no launch.
    """
    if not steps or (device != "cpu" and all(event.launched is None for event in events)):
        return events
    first, last = steps[0][0], steps[-1][1]
    if device == "cpu":
        return [event for event in events if first <= event.begin <= last]
    kept = device == "npu"  # not every kernel has an arrow there
    return [event for event in events if (kept if event.launched is None else first <= event.launched <= last)]


@functools.cache
def communicates(name: str) -> bool:
    """Tell whether a kernel or copy of a GPU is a collective: a library's, or one that a framework has of its own."""
    own = _CUSTOM.search(name) or _BETWEEN_DEVICES.search(name)
    return bool(_COMMUNICATION.search(name)) or (bool(own) and not _MATMUL.search(name))


def _kind(name: str) -> str:
    if _MATMUL.search(name):
        return MATMUL
    return COPY if _COPY.match(name) else BESIDE


def _operation(name: str) -> str:
    return next((operation for operation, pattern in OPERATIONS if pattern.search(name)), "other")


# The steps of a collective on an Ascend stream; "...Aicpu" is a fused operator's twin on the stream of collectives.
_OF_A_COLLECTIVE = re.compile(
    r"^(?:notify|event)[_ ](?:wait|record)|^reduce[_ ](?:inline|tbe)|^rdma|^aivkernel|aicpu$", re.IGNORECASE
)


def _of_a_collective(name: str, arguments: Mapping[str, Any]) -> bool:
    """Tell whether a line of an Ascend stream belongs to a collective: a kernel in AIV mode, a wait, a copy."""
    stated = str(arguments.get("Task Type", ""))
    return bool(_COMMUNICATION.search(name) or _OF_A_COLLECTIVE.search(name) or stated in ("HCCL", "COMMUNICATION"))


# The arguments of an event that a profile reads.
_KEPT = frozenset(
    {
        "correlation",
        "stream",
        "Collective name",
        "In msg nelems",
        "dtype",
        "Group size",
        "Process Group Name",
        "Process Group Description",
        "Process Group Ranks",
        "Input Dims",
        "Input type",
        "Task Type",
        "size(Byte)",
        "count",
        "data_type",
    }
)


def _kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in _KEPT}


def _launch(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"correlation": arguments["correlation"]} if "correlation" in arguments else {}


def _group(arguments: Mapping[str, Any], other: str) -> ProcessGroup:
    """Return the group that torch's profiler names (2.4 and later); before it, the stream tells groups apart."""
    if "Process Group Name" not in arguments:
        return ProcessGroup(other)
    digits = re.findall(r"\d+", str(arguments.get("Process Group Ranks", "")))
    ranks = (
        tuple(int(number) for number in digits) if "..." not in str(arguments.get("Process Group Ranks", "")) else ()
    )
    description = str(arguments.get("Process Group Description", ""))
    size = _whole_number(arguments.get("Group size")) or len(ranks)
    return ProcessGroup(str(arguments["Process Group Name"]), description, ranks, size)


def _bytes(arguments: Mapping[str, Any]) -> float | None:
    """Return the bytes that a rank puts into a collective, by what the profiler wrote of it."""
    if "size(Byte)" in arguments:
        return float(arguments["size(Byte)"])
    for count, kind in (("In msg nelems", "dtype"), ("count", "data_type")):
        width = _ITEM_BYTES.get(str(arguments.get(kind, "")).lower())
        elements = _whole_number(arguments.get(count))
        if width is not None and elements is not None:
            return float(width * elements)
    shapes, kinds = arguments.get("Input Dims") or [], arguments.get("Input type") or []
    if not shapes or not kinds:
        return None
    width = _ITEM_BYTES.get(str(kinds[0]).lower())
    return None if width is None else float(width * _elements(shapes[0]))


def _elements(shape: Any) -> int:
    """Return the elements of a shape, or of a list of shapes."""
    if shape and isinstance(shape[0], list):
        return sum(_elements(one) for one in shape)
    product = 1
    for size in shape:
        product *= int(size)
    return product if shape else 0


def _whole_number(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    text = str(value).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def idle(profile: RankProfile) -> Intervals:
    """Return when neither a kernel nor a collective ran, between the first and the last."""
    running = union(
        [*((kernel.begin, kernel.end) for kernel in profile.kernels), *((c.begin, c.end) for c in profile.collectives)]
    )
    return without([profile.span], running)
