"""Small traces in the forms that torch's and Ascend's profilers write, with sums that can be told by hand."""

import gzip
import json

STEP = 1000.0  # us
FIRST = 5_000_000.0


def span(name, category, pid, tid, begin, duration, **arguments):
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin,
        "dur": duration,
        "args": arguments,
    }


def launched(kernel, correlation, at, tid=100):
    """A kernel, and the call of the host that launched it."""
    kernel["args"]["correlation"] = correlation
    return [span("cudaLaunchKernel", "cuda_runtime", 1, tid, at, 3.0, correlation=correlation), kernel]


def of_gpu(rank=0, steps=2, ranks=2):
    """A trace of NCCL: in each step a product and its all-reduce in forward, a product beside a gradient's in backward.

    Of 1,000 us a step, matmuls run in 200..400 and 600..800, the tensor group's all-reduce in 400..500 (exposed), the
    data group's in 700..850: 100 us of it under the matmul. Backward is launched from 550 on.
    """
    events = []
    for step in range(steps):
        start = FIRST + step * STEP
        number = 100 * step
        events.append(span(f"ProfilerStep#{step + 2}", "user_annotation", 1, 100, start, STEP - 1))
        events.append(span("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 1, 101, start + 540, 200.0))
        shared = {"dtype": "BFloat16", "In msg nelems": 1 << 20, "Group size": ranks}
        tensor = {"Process Group Name": "3", "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}
        data = {"Process Group Name": "5", "Process Group Description": "undefined", "Process Group Ranks": "[0, 4]"}
        events += launched(
            span("ampere_bf16_s16816gemm_bf16", "kernel", 0, 7, start + 200, 200.0, stream=7), number, start + 10
        )
        reduce = span("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 0, 20, start + 400, 100.0, stream=20)
        reduce["args"] |= {**shared, **tensor, "Collective name": "allreduce"}
        events += launched(reduce, number + 1, start + 20)
        events += launched(
            span("cutlass_gemm", "kernel", 0, 7, start + 600, 200.0, stream=7), number + 2, start + 550, tid=101
        )
        gradients = span("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "kernel", 0, 24, start + 700, 150.0, stream=24)
        gradients["args"] |= {**shared, **data, "Collective name": "allreduce"}
        events += launched(gradients, number + 3, start + 560, tid=101)
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks},
        "traceEvents": events,
    }


def of_ascend(steps=1):
    """A ``trace_view.json``: a bare list, times as decimal strings, collectives in a process "Communication".

    A matmul in 100..300 us of each millisecond, an all-reduce in 250..400: 50 us under it, 100 exposed.
    """
    named = {1: "Python", 800: "Ascend Hardware", 900: "Communication"}
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}} for pid, name in named.items()
    ]
    threads = {(800, 2): "Stream 2", (900, 3): "Group 0 Communication", (900, 4): "Plane 0"}
    for (pid, tid), name in threads.items():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    for step in range(steps):
        at = 1704161511420000 + 1000 * step
        rows = [
            ("aclnnMatmul_MatMulV3Common_MatMulV3", 800, 2, 100, 200.0, {"Task Type": "AI_CORE"}),
            ("EVENT_WAIT", 800, 2, 400, 50.0, {"Task Type": "EVENT_WAIT"}),
            ("hcom_allReduce__721_0_1", 900, 3, 250, 150.0, {"data_type": "BFP16", "count": "1048576"}),
            ("Notify_Wait", 900, 4, 250, 100.0, {}),
        ]
        for name, pid, tid, begin, duration, arguments in rows:
            event = {
                "ph": "X",
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": f"{at + begin}.250",
                "dur": duration,
                "args": arguments,
            }
            events.append(event)
        events.append(
            {
                "ph": "X",
                "cat": "cpu_op",
                "name": f"ProfilerStep#{step}",
                "pid": 1,
                "tid": 1,
                "ts": f"{at}.000",
                "dur": 990.0,
                "args": {},
            }
        )
    return events


def write(path, trace):
    """Write a trace, packed where the name ends so."""
    text = json.dumps(trace).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
