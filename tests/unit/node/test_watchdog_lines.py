"""Lines of real logs, each with its source, and what is made of them."""

from __future__ import annotations

import time

import pytest

from nodeready.node.witnesses.logs import MOST_REPORTS, Report, reports


def report(kind, rank=None, group="", sequence=None, operation="", **counts):
    enqueued, completed = counts.get("enqueued"), counts.get("completed")
    return Report(rank, group, kind, sequence, operation, enqueued, completed)


#: Source -> lines as they stand there, and the reports.
LINES = {
    "WorkNCCL of torch 1.10, which had no numbers": (
        "[E ProcessGroupNCCL.cpp:587] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(OpType=ALLREDUCE, TensorShape=[1], Timeout(ms)=1800000) ran for 1802710 "
        "milliseconds before timing out.",
        [report("timeout", 1, operation="ALLREDUCE")],
    ),
    "agiresearch/InstructGLM 3, torch 1.13": (
        "[E ProcessGroupNCCL.cpp:821] [Rank 1] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=49, OpType=ALLREDUCE, Timeout(ms)=18000000) ran for 18005607 "
        "milliseconds before timing out.",
        [report("timeout", 1, sequence=49, operation="ALLREDUCE")],
    ),
    "OFA-Sys/OFA 271, torch 1.12": (
        "[E ProcessGroupNCCL.cpp:737] [Rank 6] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=469508, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802210 "
        "milliseconds before timing out.",
        [report("timeout", 6, sequence=469508, operation="ALLREDUCE")],
    ),
    "pytorch/pytorch 97066, torch 2.0": (
        "[E ProcessGroupNCCL.cpp:464] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=10000) ran for 10917 milliseconds "
        "before timing out.",
        [report("timeout", 0, sequence=1, operation="ALLREDUCE")],
    ),
    # Several groups' Rank 0, glued to a progress bar: which global rank it is, nobody knows.
    "pytorch/pytorch 118369, torch 2.1, sub-groups": (
        "Epoch 0:   6%|██       | 32040/500150 [6:28:43<94:39:17,  1.37it/s, v_num=95nc]"
        "[E ProcessGroupNCCL.cpp:458] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=96120, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25624887 "
        "milliseconds before timing out.\n"
        "[E ProcessGroupNCCL.cpp:458] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=96117, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625613 "
        "milliseconds before timing out.\n"
        "[E ProcessGroupNCCL.cpp:458] [Rank 7] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=64088, OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 25625251 "
        "milliseconds before timing out.",
        [
            report("timeout", None, sequence=96120, operation="ALLREDUCE"),
            report("timeout", None, sequence=96117, operation="ALLREDUCE"),
            report("timeout", 7, sequence=64088, operation="ALLREDUCE"),
        ],
    ),
    "pytorch/pytorch 122850, torch 2.3": (
        "[rank0]:[E327 17:04:16.986381360 ProcessGroupNCCL.cpp:565] [Rank 0] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, NumelIn=12, "
        "NumelOut=12, Timeout(ms)=1000) ran for 1099 milliseconds before timing out.\n"
        "[rank0]:[E327 17:04:16.988036373 ProcessGroupNCCL.cpp:1582] [PG 0 Rank 0] Timeout at "
        "NCCL work: 2, last enqueued NCCL work: 2, last completed NCCL work: 1.\n"
        "[rank0]:[E327 17:04:16.182548526 ProcessGroupNCCL.cpp:1346] [PG 0 Rank 0] Received a "
        "timeout signal from this local rank and will start to dump the debug info. Last "
        "enqueued NCCL work: 2, last completed NCCL work: 1.",
        [
            report("timeout", 0, "default_pg", 2, "ALLREDUCE", enqueued=2, completed=1),
            report("status", 0, "default_pg", enqueued=2, completed=1),
        ],
    ),
    "hiyouga/LlamaFactory 6269, torch 2.4": (
        "[rank4]:[E1206 18:44:12.755262105 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, "
        "NumelIn=544997376, NumelOut=68124672, Timeout(ms)=600000) ran for 600099 milliseconds "
        "before timing out.\n"
        "[rank4]:[E1206 18:44:12.755468433 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 4] Exception "
        "(either an error or timeout) detected by watchdog at work: 7753, last enqueued NCCL "
        "work: 7755, last completed NCCL work: 7752.",
        [report("timeout", 4, "1", 7753, "_REDUCE_SCATTER_BASE", enqueued=7755, completed=7752)],
    ),
    # A collector's prefix; a repeated line is one report.
    "hiyouga/LlamaFactory 7396, torch 2.4": (
        "[80747] [rank4]:[E321 02:07:08.414640780 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog "
        "caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
        "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600067 milliseconds "
        "before timing out.\n"
        "[80747] [rank4]: RuntimeError: NCCL watchdog thread terminated with exception: [Rank 4] "
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, "
        "NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600067 milliseconds "
        "before timing out.",
        [report("timeout", 4, sequence=1580, operation="ALLREDUCE")],
    ),
    "XPixelGroup/BasicSR 737, torch 2.5": (
        "[rank1]:[E626 06:24:44.903881913 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=808, OpType=ALLREDUCE, NumelIn=9801523, "
        "NumelOut=9801523, Timeout(ms)=600000) ran for 600020 milliseconds before timing out.\n"
        "[rank1]:[E626 06:24:44.906457629 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID "
        "0(default_pg) Rank 1] Exception (either an error or timeout) detected by watchdog at "
        "work: 808, last enqueued NCCL work: 811, last completed NCCL work: 807.",
        [report("timeout", 1, "default_pg", 808, "ALLREDUCE", enqueued=811, completed=807)],
    ),
    # A group without a description; the rank in the line is the group's, the prefix the job's.
    "a log of sglang, torch 2.5": (
        "[2025-02-27T16:30:43.48675097Z] [rank3]:[E227 16:30:43.526290891 "
        "ProcessGroupNCCL.cpp:1785] [PG ID 2 PG GUID 3 Rank 1] Exception (either an error or "
        "timeout) detected by watchdog at work: 32, last enqueued NCCL work: 32, last completed "
        "NCCL work: 31.",
        [report("timeout", 3, "3", 32, enqueued=32, completed=31)],
    ),
    "a log of torch 2.7": (
        "Epoch 10/10: 240it [05:55,  1.47s/it, loss=5.46][rank0]:[E709 17:05:38.162555850 "
        "ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=20585, OpType=ALLREDUCE, NumelIn=1259621, NumelOut=1259621, "
        "Timeout(ms)=600000) ran for 600000 milliseconds before timing out.\n"
        "[rank0]:[E709 17:05:38.162814866 ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID "
        "0(default_pg) Rank 0]  failure detected by watchdog at work sequence id: 20585 PG "
        "status: last enqueued work: 20589, last completed work: 20584\n"
        "[rank0]:[E709 17:05:38.162832798 ProcessGroupNCCL.cpp:670] Stack trace of the failed "
        "collective not found, potentially because FlightRecorder is disabled.\n"
        "[rank0]:[E709 17:05:38.162895613 ProcessGroupNCCL.cpp:2106] [PG ID 0 PG GUID "
        "0(default_pg) Rank 0] First PG on this rank to signal dumping.",
        [report("timeout", 0, "default_pg", 20585, "ALLREDUCE", enqueued=20589, completed=20584)],
    ),
    "a log of torch 2.9": (
        "[rank3]:[E703 15:37:17.178057290 ProcessGroupNCCL.cpp:1922] [PG ID 0 PG GUID "
        "0(default_pg) Rank 3] Observed flight recorder dump signal from another rank via "
        "TCPStore.\n"
        "[rank3]:[E703 15:37:17.178377689 ProcessGroupNCCL.cpp:1987] [PG ID 0 PG GUID "
        "0(default_pg) Rank 3] Received a dump signal due to a collective timeout from  rank 7 "
        "and we will try our best to dump the debug info. Last enqueued NCCL work: 56118, last "
        "completed NCCL work: 56118.This is most likely caused by incorrect usages of "
        "collectives, e.g., wrong sizes used across ranks, the order of collectives is not same",
        [report("status", 3, "default_pg", enqueued=56118, completed=56118)],
    ),
    "ProcessGroupNCCL.cpp of torch 2.7: logPrefix without an id": (
        "[rank5]:[E101 00:00:00.000000001 ProcessGroupNCCL.cpp:2268] [PG GUID "
        "22(TENSOR_MODEL_PARALLEL_GROUP) Rank 1]  failure detected by watchdog at work sequence "
        "id: 809868 PG status: last enqueued work: 809948, last completed work: 809867",
        [
            report(
                *("timeout", 5, "TENSOR_MODEL_PARALLEL_GROUP", 809868),
                enqueued=809948,
                completed=809867,
            )
        ],
    ),
    # The group's own rank, and no prefix: whose line it is, nobody knows.
    "the same line without its prefix": (
        "[E101 00:00:00.000000001 ProcessGroupNCCL.cpp:2268] [PG GUID "
        "22(TENSOR_MODEL_PARALLEL_GROUP) Rank 1]  failure detected by watchdog at work sequence "
        "id: 809868 PG status: last enqueued work: 809948, last completed work: 809867",
        [
            report(
                *("timeout", None, "TENSOR_MODEL_PARALLEL_GROUP", 809868),
                enqueued=809948,
                completed=809867,
            )
        ],
    ),
    "ProcessGroupNCCL.cpp of torch 2.8: a started collective": (
        "[rank5]:[E1 00:00:00.0 ProcessGroupNCCL.cpp:1] [PG ID 3 PG GUID 9(dcp) Rank 5] failure "
        "detected by watchdog at work sequence id: 224761 PG status: last enqueued work: 224769, "
        "last started work: -1, last completed work: 224760",
        [report("timeout", 5, "dcp", 224761, enqueued=224769, completed=224760)],
    ),
    "a stall of the file system, torch 2.8": (
        "[rank2]:[F729 10:00:00.000000000 ProcessGroupNCCL.cpp:1600] [PG ID 0 PG GUID "
        "0(default_pg) Rank 2] Received a dump signal due to a collective timeout from this "
        "local rank and we will try our best to dump the debug info. Last enqueued NCCL work: -1, "
        "last completed NCCL work: -1.",
        [report("status", 2, "default_pg", enqueued=0, completed=0)],
    ),
    "HeartbeatMonitor of torch 2.15, strings of libtorch_cuda.so": (
        "[rank6]:[E101 00:00:00.000000001 ProcessGroupNCCL.cpp:1790] [PG ID 0 PG GUID "
        "0(default_pg) Rank 6] ProcessGroupNCCL's watchdog got stuck for 480 seconds without "
        "making progress in monitoring enqueued collectives. This typically indicates a "
        "NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, ",
        [report("stuck", 6, "default_pg")],
    ),
    "a log of Megatron, torch 2.3": (
        "[rank25]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 25] Heartbeat monitor timed out! "
        "Process will be terminated after dumping debug info. workMetaList_.size()=2\n"
        "[rank25]:[F ProcessGroupNCCL.cpp:1169] [PG 0 Rank 25] [PG 0 Rank 25] ProcessGroupNCCL's "
        "watchdog got stuck for 600 seconds without making progress",
        [report("stuck", 25, "default_pg")],
    ),
    "nccl2 of torch 2.15: Logging.hpp, WorkNCCL.cpp": (
        "[rank3]:[E101 00:00:00.000000001 WorkNCCL.cpp:200] [TC][rank=3][name=default_pg] "
        "Watchdog caught collective operation timeout: NCCL operation timed out",
        [report("timeout", 3, "default_pg")],
    ),
    "torch 2.15, gloo": (
        "[rank1]:     work.wait()\n"
        "[rank1]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
        "unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation to complete",
        [report("timeout", 1, operation="recv")],
    ),
    "FoundationVision/VNext 9, torch 1.12, gloo": (
        "RuntimeError: [/.../third_party/gloo/gloo/"
        "transport/tcp/unbound_buffer.cc:136] Timed out waiting 1800000ms for send operation to "
        "complete",
        [report("timeout", operation="send")],
    ),
    "torch 1.13, gloo": (
        "RuntimeError: [./gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 4000ms for "
        "recv operation to complete\n"
        "RuntimeError: [./gloo/transport/tcp/pair.cc:598] Connection closed by peer "
        "[127.0.0.1]:54452",
        [report("timeout", operation="recv"), report("lost")],
    ),
    "torch 1.13, monitored_barrier: the line of the log and the exception": (
        "E20261122 16:29:16.350992 20732 ProcessGroupGloo.cpp:137] [Rank 0]: Rank 2 failed to "
        "pass monitoredBarrier in 3000 ms\n"
        "RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 3000 ms\n"
        "E20261122 16:29:16.330688 20733 ProcessGroupGloo.cpp:137] Rank 1 successfully reached "
        "monitoredBarrier, but received errors while waiting for send/recv from rank 0. Please "
        "check rank 0 logs for faulty rank.",
        [
            report("missing", 2, operation="monitoredBarrier"),
            report("reached", 1, operation="monitoredBarrier"),
        ],
    ),
    "torch 1.13, TORCH_DISTRIBUTED_DEBUG=DETAIL": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running "
        "collective: CollectiveFingerPrint(OpType=ALLREDUCE, TensorShape=[4], "
        "TensorDtypes=Float), but Rank 2 is running collective: "
        "CollectiveFingerPrint(OpType=ALLGATHER, TensorShape=[4], TensorDtypes=Float).",
        [
            report("mismatch", 1, operation="ALLREDUCE"),
            report("mismatch", 2, operation="ALLGATHER"),
        ],
    ),
    "torch 2.15, gloo, a rank has ended": (
        "[rank1]: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] "
        "Connection closed by peer [127.0.0.1]:47301. This is typically caused by a remote "
        "worker crashing. Check the logs of the remote worker before reporting an error. GLHF!",
        [report("lost", 1)],
    ),
    "NVIDIA/nccl: socket.cc of 2.19": (
        "gpu003:4711:4890 [3] misc/socket.cc:484 NCCL WARN socketProgressOpt: Call to recv from "
        "10.0.0.7<49874> failed : Connection reset by peer",
        [report("lost")],
    ),
    "torch 2.15, gloo, a reset": (
        "[rank2]: RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
        "pair.cc:547] Read error [127.0.0.1]:47301: Connection reset by peer",
        [report("lost", 2)],
    ),
    "torch 2.8, TCPStore": (
        "[rank3]:[W709 17:05:38.162555850 TCPStore.cpp:125] [c10d] recvValue failed on "
        "SocketImpl(fd=58, addr=[gpu001]:45678, remote=[gpu001]:29500): Failed to recv, got 0 "
        "bytes. Connection was likely closed. Did the remote server shutdown or crash?",
        [report("lost", 3, operation="store")],
    ),
    "torch 2.8, the heartbeat monitor and TCPStore": (
        "[rank3]:[W709 17:05:39.162555850 ProcessGroupNCCL.cpp:1681] [PG ID 0 PG GUID "
        '0(default_pg) Rank 3] Failed to check the "should dump" flag on TCPStore, (maybe '
        "TCPStore server has shut down too early), with error: Broken pipe",
        [report("lost", 3, "default_pg", operation="store")],
    ),
    "torch 2.15, monitored_barrier": (
        "[rank0]: RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 3000 ms\n"
        "[rank0]:  Original exception: \n",
        [report("missing", 2, operation="monitoredBarrier")],
    ),
    "torch 2.15, monitored_barrier, all ranks": (
        "[rank0]: RuntimeError: [Rank 0]: Ranks 2, 3 failed to pass monitoredBarrier in 3000 ms",
        [
            report("missing", 2, operation="monitoredBarrier"),
            report("missing", 3, operation="monitoredBarrier"),
        ],
    ),
    "NVIDIA/nccl 849, torch 1.13": (
        "RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 2000000 ms",
        [
            report("missing", 4, operation="monitoredBarrier"),
            report("missing", 5, operation="monitoredBarrier"),
        ],
    ),
    # Rank 0 of the group is rank 4 of the job: rank 1 of the group is not the job's.
    "monitored_barrier of a sub-group": (
        "[rank4]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms",
        [report("missing", None, operation="monitoredBarrier")],
    ),
    "PyTorch's documentation of monitored_barrier": (
        "RuntimeError: Rank 1 failed to pass monitoredBarrier in 2000 ms",
        [report("missing", 1, operation="monitoredBarrier")],
    ),
    "torch 2.15, monitored_barrier, rank 0 late": (
        "[rank3]: RuntimeError: Rank 3 successfully reached monitoredBarrier, but received "
        "errors while waiting for send/recv from rank 0. Please check rank 0 logs for faulty "
        "rank.\n"
        "[rank3]:  Original exception: \n",
        [report("reached", 3, operation="monitoredBarrier")],
    ),
    "ProcessGroupGloo.cpp": (
        "[rank0]: RuntimeError: Rank 0 timed out in monitoredBarrier after 2000 ms.",
        [report("timeout", 0, operation="monitoredBarrier")],
    ),
    "torch 2.15, TORCH_DISTRIBUTED_DEBUG=DETAIL": (
        "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is "
        "running collective: CollectiveFingerPrint(SequenceNumber=1, OpType=ALLREDUCE, "
        "TensorShape=[4], TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float "
        "(default), device=cpu, layout=Strided (default), requires_grad=false (default), "
        "pinned_memory=false (default), memory_format=(nullopt))), but Rank 2 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=1, OpType=ALLGATHER, TensorShape=[4], "
        "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu, "
        "layout=Strided (default), requires_grad=false (default), pinned_memory=false (default), "
        "memory_format=(nullopt))).Collectives differ in the following aspects:",
        [
            report("mismatch", 0, sequence=1, operation="ALLREDUCE"),
            report("mismatch", 2, sequence=1, operation="ALLGATHER"),
        ],
    ),
    "bghira/SimpleTuner 2712": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running "
        "collective: CollectiveFingerPrint(SequenceNumber=101, OpType=ALLGATHER, "
        "TensorShape=[1]), but Rank 7 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE).Collectives differ",
        [
            report("mismatch", 1, sequence=101, operation="ALLGATHER"),
            report("mismatch", 7, sequence=0, operation="REDUCE"),
        ],
    ),
    "pytorch/pytorch 78022, torch 1.12": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
        "inconsistent collective: CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[34112]",
        [report("mismatch", 0, operation="BROADCAST")],
    ),
    "TraceUtils.h, TORCH_NCCL_DESYNC_DEBUG": (
        "\t - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync "
        "are:\n"
        "\t   - [1, 2] joined but didn't finish collective #41207 (count from 1)\n"
        "\t     [0] finished collective #41207, but didn't join collective #41208 (count from 1)",
        [
            report("status", 1, enqueued=41207, completed=41206),
            report("status", 2, enqueued=41207, completed=41206),
            report("missing", 0, sequence=41208, completed=41207),
        ],
    ),
    "TraceUtils.h, a rank that never came": (
        "\t - To our best knowledge, ranks [47] are the lagging ranks that caused this timeout. "
        "They never joined any collectives",
        [report("missing", 47, enqueued=0, completed=0)],
    ),
    "torch 2.15, TCPStore": (
        "[rank1]: torch.distributed.DistStoreError: wait timeout after 300000ms, keys: "
        "/default_pg/0//cpu//0/0",
        [report("timeout", 1, operation="store")],
    ),
    "torch 2.15, TCPStore, nobody came": (
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 "
        "clients joined.",
        [report("timeout", operation="store")],
    ),
    "an ordinary log": (
        "requests.exceptions.ConnectionError: [Errno 104] Connection reset by peer\n"
        "BrokenPipeError: [Errno 32] Broken pipe\nssh: Connection closed by peer\n"
        "step 7 loss 2.31\n[rank0]: Traceback (most recent call last):\n"
        "Connection closed\nwatchdog started\nTimed out waiting for the tests\n"
        "[rank0]:[W1 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0 Rank 0] using GPU 0",
        [],
    ),
}


@pytest.mark.parametrize("source", LINES)
def test_what_a_watchdog_wrote_is_data(source):
    text, expected = LINES[source]
    assert list(reports(text.splitlines())) == expected


def test_tee_of_torchrun_puts_the_local_rank_before_the_global_one():
    line = (
        "[default1]:[rank5]:[E1 P.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 5] failure detected "
        "by watchdog at work sequence id: 7 PG status: last enqueued work: 9, last completed "
        "work: 6"
    )
    assert [one.rank for one in reports([line])] == [5]


@pytest.mark.parametrize(
    "line",
    [
        f"Ranks {'1' * 4000} failed to pass monitoredBarrier",
        f"Ranks {'1, ' * 1300} failed to pass monitoredBarrie",
        f"[{'11111, ' * 600}] finished collective #",
        "Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=" + "9" * 3000,
        f"last enqueued work: {'9' * 3000}, last completed work: -",
        "[PG ID " * 600 + "watchdog",
        "[rank99999999999999999999]: Watchdog caught collective operation timeout: SeqNum=--1",
    ],
)
def test_a_line_that_is_made_to_take_long_takes_none(line):
    began = time.process_time()
    reports([line] * 20)
    assert time.process_time() - began < 5


def test_no_more_is_told_than_a_node_can_tell():
    text = "[rank{0}]: Timed out waiting 1ms for recv operation to complete"
    assert len(reports(text.format(n) for n in range(100_000))) == MOST_REPORTS
