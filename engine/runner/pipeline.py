"""Look-ahead: a step is started while the one before is still being computed.

On CUDA a start only queues work, so there is nothing to do but to wait for the right step. A CPU
computes in the thread that asks, so there the steps run in a thread of their own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from engine.core.batch import Batch
from engine.runner.model_runner import ModelRunner, Prepared, StepOutput
from engine.runner.ranks import LeadRunner


class InFlight:
    """A started step. `finish()` gives its output, or raises what went wrong in it."""

    def __init__(self, batch: Batch):
        self.batch = batch
        self.started = perf_counter()
        self.prepared: Prepared | None = None
        self.launched: Future[None] | None = None
        self.error: BaseException | None = None  # the step's own: waiting again gives it again

    def finish(self) -> StepOutput:
        """Wait for the step. May be called again, as after an interrupt."""
        if self.launched is not None:
            self.launched.result()
        if self.error is not None:
            raise self.error
        assert self.prepared is not None
        return self.prepared.read()

    def discard(self) -> None:
        """Wait until it has stopped writing; whatever it brought is not wanted."""
        try:
            self.finish()
        except Exception:
            pass
        except BaseException as error:
            if error is not self.error:  # an interrupt of the wait
                raise


class Pipeline:
    """Starts steps of one runner, in order; at most two are in flight."""

    def __init__(self, runner: ModelRunner | LeadRunner):
        self.runner = runner
        self.last_finish = 0.0
        self._thread = (ThreadPoolExecutor(1, thread_name_prefix="tandem-step")
                        if runner.device.type == "cpu" else None)

    def start(self, batch: Batch, before: InFlight | None) -> InFlight:
        """Never raises for a step that goes wrong: finish() does."""
        flight = InFlight(batch)
        try:
            flight.prepared = self.runner.prepare_step(
                batch, None if before is None else before.prepared)
        except Exception as error:
            flight.error = error
            return flight
        if self._thread is None:
            self._launch(flight, flight.prepared, before)
        else:
            flight.launched = self._thread.submit(self._launch, flight, flight.prepared, before)
        return flight

    def _launch(self, flight: InFlight, step: Prepared, before: InFlight | None) -> None:
        """Nothing stands on a step that failed: the one after it is not executed, on no rank."""
        if before is not None and before.error is not None:
            flight.error = before.error
            return
        try:
            self.runner.launch(step)
            flight.error = step.error
        except Exception as error:
            flight.error = error
        except BaseException as error:
            if self._thread is None:
                raise  # this is the caller's thread
            flight.error = error

    def finish(self, flight: InFlight) -> tuple[StepOutput, float]:
        """The step's output, and the seconds that only it took: since it started, or since the one
        before was finished, so that all steps' seconds add up to the time that went by."""
        output = flight.finish()
        return output, self.lap(flight)

    def lap(self, flight: InFlight) -> float:
        begin, self.last_finish = max(flight.started, self.last_finish), perf_counter()
        return self.last_finish - begin

    def close(self) -> None:
        """End the thread, once it is done with what it has."""
        if self._thread is not None:
            self._thread.shutdown()
