"""Who carries transfers: a thread of the host for CPU tensors, a stream for those on a GPU.

A wire carries one collective at a time, in the order of issue, whichever group issued it: groups
that share a link share its bandwidth. A delivery starts no earlier than what the current stream
held when it was issued, and waiting for one makes the current stream wait, not the host -
ProcessGroupNCCL's rules. On a CPU the caller is the stream.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from overlap.emulation.announcing import announced
from overlap.emulation.link import EmulatedLink
from overlap.emulation.transfer import Transfer

__all__ = ["Delivery", "DeviceWire", "HostWire", "Wire", "wire_for"]


class Delivery(Protocol):
    """Transfers on their way."""

    def wait(self) -> None:
        """Order the current stream after them."""

    def done(self) -> bool:
        """Whether they have arrived."""


class Wire(Protocol):
    def send(self, operation: str, transfers: Sequence[Transfer], wire_bytes: float) -> Delivery:
        """Start to carry ``transfers``, which take the time of ``wire_bytes``."""

    def close(self) -> None:
        """Carry nothing any more."""


def wire_for(device: torch.device, link: EmulatedLink) -> Wire:
    """Return a wire for tensors on ``device``.

    Raises:
        ValueError: Neither a CPU nor a CUDA device.
    """
    if device.type == "cpu":
        return HostWire(link)
    if device.type == "cuda":
        return DeviceWire(link, device)
    raise ValueError(f"emulated collectives move CPU and CUDA tensors, not {device.type} ones")


class HostWire:
    """A thread that sleeps for the time of the link and then writes what arrives."""

    def __init__(self, link: EmulatedLink) -> None:
        self._link = link
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emulated-link")

    def send(self, operation: str, transfers: Sequence[Transfer], wire_bytes: float) -> Delivery:
        arrived: torch.futures.Future[None] = torch.futures.Future()
        tensors = [tensor for t in transfers for tensor in (t.target, t.source)]
        with announced(operation, tensors, until=arrived):
            return _HostDelivery(self._thread.submit(self._carry, transfers, wire_bytes, arrived))

    def _carry(
        self,
        transfers: Sequence[Transfer],
        wire_bytes: float,
        arrived: torch.futures.Future[None],
    ) -> None:
        due = time.perf_counter() + self._link.seconds(wire_bytes)
        try:
            for transfer in transfers:
                transfer.deliver()
            time.sleep(max(0.0, due - time.perf_counter()))
        finally:
            arrived.set_result(None)

    def close(self) -> None:
        self._thread.shutdown()


class _HostDelivery:
    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    def done(self) -> bool:
        return self._future.done()


class DeviceWire:
    """A high-priority stream, on which the copy kernel or the copy engine keeps time."""

    def __init__(self, link: EmulatedLink, device: torch.device) -> None:
        # The stubs take the static method for another.
        highest = torch.cuda.Stream.priority_range()[1]  # type: ignore[call-arg]
        self._stream = torch.cuda.Stream(device, priority=highest)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._driver = _Kernel(link, device) if link.ctas else _CopyEngine(link, device)

    def send(self, operation: str, transfers: Sequence[Transfer], wire_bytes: float) -> Delivery:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        tensors = [tensor for t in transfers for tensor in (t.target, t.source)]
        with announced(operation, tensors), torch.cuda.stream(self._stream):
            finish = self._driver.carry(transfers, wire_bytes)
            return _DeviceDelivery(self._stream.record_event(), finish)

    def close(self) -> None:
        self._stream.synchronize()


class _DeviceDelivery:
    def __init__(self, event: torch.cuda.Event, finish: Callable[[], None] | None) -> None:
        self._event = event
        self._finish = finish

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        return self._event.query()


class _Kernel:
    """The copy kernel of `overlap.emulation.kernels`."""

    def __init__(self, link: EmulatedLink, device: torch.device) -> None:
        from overlap.emulation import kernels  # Triton is needed here only

        self._link = link
        self._kernels = kernels
        self._staging = torch.empty(kernels.STAGING_BYTES, dtype=torch.uint8, device=device)

    def carry(self, transfers: Sequence[Transfer], wire_bytes: float) -> None:
        wire_ns = int(self._link.seconds(wire_bytes) * 1e9)
        latency_ns = min(wire_ns, int(self._link.latency * 1e3))
        rows = sum(transfer.chunks * transfer.length for transfer in transfers)
        for index, transfer in enumerate(transfers):
            share = transfer.chunks * transfer.length / max(1, rows)
            self._kernels.launch(
                transfer,
                self._staging,
                ctas=self._link.ctas,
                clusters=self._link.clusters,
                latency_ns=0 if index else latency_ns,
                wire_ns=int((wire_ns - latency_ns) * share),
            )


class _CopyEngine:
    """Copies that no SM takes part in.

    What arrives is copied inside the device, which is fast; then copies from pinned host memory,
    whose rate is measured once, fill the time that the link would take. A sum needs arithmetic,
    which a copy engine has not: it is done on the stream that waits.
    """

    _FILLER_BYTES = 1 << 26

    def __init__(self, link: EmulatedLink, device: torch.device) -> None:
        self._link = link
        self._host = torch.empty(self._FILLER_BYTES, dtype=torch.uint8, pin_memory=True)
        self._sink = torch.empty_like(self._host, device=device)
        half = self._FILLER_BYTES // 2
        self._device_rate = _rate(lambda: self._sink[:half].copy_(self._sink[half:]), half)
        self._host_rate = _rate(lambda: self._fill(self._FILLER_BYTES), self._FILLER_BYTES)

    def _fill(self, num_bytes: int) -> None:
        self._sink[:num_bytes].copy_(self._host[:num_bytes], non_blocking=True)

    def carry(self, transfers: Sequence[Transfer], wire_bytes: float) -> Callable[[], None]:
        left = self._link.seconds(wire_bytes)
        with torch.no_grad():
            for transfer in transfers:
                transfer.copy()
                left -= transfer.target.nbytes / self._device_rate
        filler = int(max(0.0, left) * self._host_rate)
        while filler:
            piece = min(filler, self._FILLER_BYTES)
            self._fill(piece)
            filler -= piece

        def finish() -> None:
            with torch.no_grad():
                for transfer in transfers:
                    transfer.scale()

        return finish


def _rate(copy: Callable[[], Any], num_bytes: int) -> float:
    """Bytes per second of ``copy`` on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first time pages are touched
        begin.record()
        for _ in range(8):
            copy()
        end.record()
    end.synchronize()
    return 8 * num_bytes / (begin.elapsed_time(end) * 1e-3)
