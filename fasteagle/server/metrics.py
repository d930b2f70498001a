"""Numbers for Prometheus, under vLLM's names where they mean the same, so that dashboards fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from fasteagle.options import MOST_AT_ONCE

if TYPE_CHECKING:
    from fasteagle.server.job import Job

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
FINISHES = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class Metrics:
    """Metrics of one server, for any thread; every name has the label `model_name`."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            names = ("model_name",)
            made = Histogram(name, text, names, registry=self.registry, buckets=buckets)
            return made.labels(model)

        def gauge(name: str) -> Gauge:
            return Gauge(name, "", ("model_name",), registry=self.registry).labels(model)

        self._drafts = counter("vllm:spec_decode_num_drafts", "Passes that verified a tree.")
        self._drafted = counter("vllm:spec_decode_num_draft_tokens", "Tokens verified.")
        self._accepted = counter("vllm:spec_decode_num_accepted_tokens", "Tokens guessed right.")
        self._by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Passes in which the guess at this place of the path was right.",
            "position",
        )
        self._prompt = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = counter("vllm:generation_tokens", "Tokens of answers.")
        self._queried = counter("vllm:prefix_cache_queries", "Tokens looked up in the KV cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Tokens found in the KV cache.")
        self._success = counter(
            "vllm:request_success", "Answers, by how they ended.", "finished_reason"
        )
        self._failed = counter("vllm:request_failed", "Requests without a whole answer.", "reason")
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Waiting included.", SECONDS)
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of an answer.", TOKEN_SECONDS
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Waiting included.", SECONDS)
        self.queued = histogram("vllm:request_queue_time_seconds", "Waiting.", SECONDS)
        self._refused = counter(
            "fasteagle:requests_refused", "Requests that got an error, by HTTP status.", "status"
        )
        self.planning = histogram(
            "fasteagle:request_planning_time_seconds",
            "Template, tokens and grammar, waiting for them included.",
            SECONDS,
        )
        self.at_once = histogram(
            "fasteagle:answers_per_pass",
            "Answers that one pass of the model went on with.",
            range(1, MOST_AT_ONCE + 1),
        )
        ProcessCollector(registry=self.registry)
        self.running = gauge("vllm:num_requests_running")
        self.waiting = gauge("vllm:num_requests_waiting")

    def answered(self, status: int) -> None:
        """Count a request that got an error."""
        if status >= 400:
            self._refused.labels(self._model, str(status)).inc()

    def refused(self, reason: str) -> None:
        """Count a job that was not let in: `reason` is queue_full or shutdown."""
        self._failed.labels(self._model, reason).inc()

    def finished(self, job: Job) -> None:
        """Count a job that has ended, also one that ended while it waited."""
        stats, model = job.stats, self._model
        self._drafts.labels(model).inc(len(stats.path_lengths))
        self._drafted.labels(model).inc(stats.drafted)
        self._accepted.labels(model).inc(stats.accepted)
        for place in range(max(stats.path_lengths, default=0)):
            n = sum(length > place for length in stats.path_lengths)
            self._by_position.labels(model, str(place)).inc(n)
        self._generated.labels(model).inc(stats.new_tokens)
        if job.is_first:  # the prompt of several answers counts once, as in their usage
            self._prompt.labels(model).inc(stats.prompt_tokens)
            self._queried.labels(model).inc(stats.prompt_tokens)
            self._hits.labels(model).inc(stats.cached_tokens)
        if job.first_token is not None:
            self._ttft.observe(job.first_token)
        if job.outcome not in FINISHES:
            self._failed.labels(model, job.outcome).inc()
            return
        self._success.labels(model, FINISHES[job.outcome]).inc()
        self._whole.observe(job.seconds)
        if stats.new_tokens > 1:
            self._per_token.observe(stats.decode_seconds / (stats.new_tokens - 1))

    def text(self) -> bytes:
        """Return the numbers in Prometheus' format."""
        return generate_latest(self.registry)
