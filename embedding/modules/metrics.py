"""Defines what each metric means, and exports metrics to Prometheus and TensorBoard."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

from ...engine.errors import ClosedError, InputError, OptionError, TierbedError
from ...engine.metric_families import Families, Metric, counter, gauge, make_latency_metrics
from ...engine.table.table_report import LOCK_TIMEOUT
from .embedding import MultiTableMultiColumnEmbedding

METRICS: dict[str, Metric] = {
    # metrics of the embedding
    "rows": gauge("written rows of all tables, like `size()`"),
    "step": gauge("training steps of this embedding; stored in snapshots"),
    "dropped": counter("illegal ids that lookups and `get` dropped, if `bad_ids` is `drop`"),
    "refused": counter("times that `admission` refused a new row"),
    "evicted": counter("rows deleted because of `capacity`"),
    "expired": counter("rows deleted because of `ttl_steps`"),
    "deleted": counter("rows deleted by `delete`"),
    "ledger_bytes": gauge("host memory that `eviction`, `admission` and `ttl_steps` use"),
    "changed_keys_bytes": gauge("memory of the list of changed rows, at most `changed_keys_mb`"),
    "total_bytes": gauge(
        "memory of all tiers, their overflow areas, `ledger_bytes` and `changed_keys_bytes`", "total_memory_bytes"
    ),
    **{
        f"{purpose}_{name}": counter(f"rows that {calls} found {meaning}")
        for purpose, calls in (("train", "training or `put`"), ("evaluate", "evaluation"))
        for name, meaning in (
            ("hits", "in the top tier"),
            ("misses", "in a lower tier"),
            ("unknown", "in no tier (never written)"),
        )
    },
    "prefetch_hits": counter("steps with a batch that `prefetch` had announced"),
    "prefetch_misses": counter("steps whose batch differs from the next announced batch"),
    "prefetch_dropped": counter("batches that `prefetch` announced and dropped, because too many waited"),
    # metrics of an embedding with a world, in addition to its tiers' metrics
    "ids_sent": counter("distinct ids requested from other ranks"),
    "ids_received": counter("distinct ids requested by other ranks"),
    "rows_sent": counter("rows sent to other ranks"),
    "rows_received": counter("rows received from other ranks"),
    "bytes_sent": counter("bytes of ids, rows and gradients sent"),
    "bytes_received": counter("bytes of ids, rows and gradients received"),
    # metrics of every tier
    "hits": counter("rows requested from this tier and found"),
    "misses": counter("rows requested from this tier and not found"),
    "insertions": counter("rows inserted into this tier; for `ssd`, equal to `rows_written`"),
    "bytes_in": counter("bytes of rows copied into a cache from below, or into the last tier from above", "in_bytes"),
    "bytes_out": counter("bytes of rows copied out: from a cache down, or from the last tier up", "out_bytes"),
    "resident_rows": gauge("rows in this tier now; for `ssd` an estimate, too high until compaction"),
    "bytes": gauge(
        "memory of rows, metadata and indexes; excludes `overflow_bytes` and `window_bytes`", "memory_bytes"
    ),
    **make_latency_metrics("fetch"),
    **make_latency_metrics("write"),
    # metrics of caches
    "capacity": gauge("rows that fit into this tier", "capacity_rows"),
    "fill": gauge("`resident_rows` / `capacity`", "fill_ratio"),
    "index_bytes": gauge("memory of the index, a part of `bytes`"),
    "evictions_clean": counter("unchanged rows evicted from the cache, without write-back"),
    "evictions_dirty": counter("changed rows evicted from the cache and written back"),
    "too_small": gauge("1 if the cache misses over half of the rows because it evicts rows that are needed again"),
    "overflows": counter("rows that did not fit in their set of 64: current or announced batches need all its rows"),
    "overflow_rows": gauge("rows in the overflow area now"),
    "overflow_peak_rows": gauge("the peak of `overflow_rows`"),
    "overflow_capacity": gauge("prefetch and steps wait if `overflow_rows` would exceed it", "overflow_capacity_rows"),
    "overflow_evictions": counter("rows evicted from the overflow area"),
    "overflow_bytes": gauge("memory of the overflow area"),
    "window_bytes": gauge("memory for lists of announced rows that are not cached yet"),
    "prefetch_waits": counter("times that prefetch waited for space in the overflow area"),
    # metrics of RocksDB
    "rows_written": counter("rows written to RocksDB"),
    "rows_erased": counter("rows that RocksDB was told to erase, even rows that it did not have"),
    "read_threads": gauge("number of threads for the next read, up to `io_threads`"),
    "read_buffer_bytes": gauge("the most memory that the threads of one read held"),
    "memtable_bytes": gauge("memory of written rows that are not yet in RocksDB's files"),
    "index_filter_bytes": gauge("memory of indexes and filters, outside the block cache"),
    "block_cache_bytes": gauge("memory of RocksDB's block cache; with `index_mb`, it holds indexes and filters"),
    "block_cache_hits": counter("blocks found in RocksDB's block cache"),
    "block_cache_misses": counter("blocks read from files instead of the block cache"),
    "bloom_useful": counter("file reads that a Bloom filter avoided"),
    "sst_bytes": gauge("size of RocksDB's files"),
    "live_data_bytes": gauge("estimate of `sst_bytes` minus the replaced versions of rows"),
    "flush_bytes": counter("bytes written to files by saves and from memtables"),
    "compaction_bytes": counter("bytes that compactions wrote"),
    "compaction_read_bytes": counter("bytes that compactions read"),
    "pending_compaction_bytes": gauge("estimated bytes that compactions must still rewrite"),
    "running_flushes": gauge("memtable flushes running now"),
    "running_compactions": gauge("compactions running now"),
    "background_errors": counter("failed memtable flushes and compactions"),
    "stall_seconds": counter("time that writes waited for flushes and compactions"),
    "write_amplification": gauge("bytes written to RocksDB's files / bytes of rows written"),
}

TABLE_METRICS: dict[str, Metric] = {
    "rows": gauge("written rows of this table", "table_rows"),
    "hits": counter("rows of this table found in the top tier", "table_hits"),
    "misses": counter("rows of this table not found in the top tier", "table_misses"),
    "dropped": counter("illegal ids dropped in lookups of this table", "table_dropped"),
}


class MetricsCollector:
    """Collects embeddings' metrics for a `prometheus_client` registry, whenever they are requested.

    Args:
        embeddings: The embeddings, each as a separate argument.

    Raises:
        OptionError: If `prometheus_client` is not installed.
        InputError: If an argument is not an embedding, or two embeddings share a name.

    Example:

        >>> prometheus_client.REGISTRY.register(MetricsCollector(embedding))
        >>> prometheus_client.start_http_server(9100)
    """

    def __init__(self, *embeddings: MultiTableMultiColumnEmbedding) -> None:
        _import_prometheus()
        _check_embeddings(embeddings)
        self._embeddings = embeddings

    def describe(self) -> list[Any]:
        """Return an empty list, so that registering the collector reads no store."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield a family for each metric, with the labels `embedding` and `tier`.

        Latencies also carry the label `quantile`; 1 is the longest call. A table's metrics carry the labels `embedding`
        and `table`. `tierbed_up` is 1 for an embedding with metrics. It is 0 if the embedding is unused, closed or
        failed; only a failed embedding also gives a warning.
        """
        families = Families("tierbed_")
        deadline = monotonic() + LOCK_TIMEOUT  # one deadline for all embeddings
        for embedding in self._embeddings:
            metrics = _read(embedding, max(deadline - monotonic(), 0))
            embedding_label = {"embedding": embedding.name}
            families.add("up", gauge("whether the embedding has metrics"), bool(metrics), **embedding_label)
            for table, numbers in metrics.pop("tables", {}).items():
                for name, value in numbers.items():
                    families.add(name, TABLE_METRICS[name], value, **embedding_label, table=table)
            for tier, numbers in metrics.items():
                for name, value in numbers.items():
                    families.add(name, METRICS[name], value, **embedding_label, tier=tier)
        yield from families


def prometheus_text(*embeddings: MultiTableMultiColumnEmbedding) -> str:
    """Return open embeddings' metrics in Prometheus' text format, for a textfile collector or your own server.

    `tierbed_up` shows which embeddings have metrics. Raises the same errors as `MetricsCollector`.
    """
    prometheus = _import_prometheus()
    registry = prometheus.CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(*embeddings))
    return str(prometheus.generate_latest(registry).decode())


def write_tensorboard(writer: Any, *embeddings: MultiTableMultiColumnEmbedding, step: int | None = None) -> None:
    """Add open embeddings' metrics to a TensorBoard writer, as scalars.

    Tags are `<embedding>/<tier>/<metric>`, and for a table `<embedding>/tables/<table>/<metric>`. An embedding that was
    not used yet adds nothing. An embedding that fails gives a warning.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`.
        embeddings: The embeddings, each as a separate argument.
        step: Position on the x axis. Default: the embedding's step.

    Raises:
        ClosedError: If an embedding was closed.
        InputError: If `writer` is not a writer, an argument is not an embedding, or two embeddings share a name.
    """
    if not hasattr(writer, "add_scalar"):
        raise InputError(f"writer={writer!r}: give a torch.utils.tensorboard.SummaryWriter")
    _check_embeddings(embeddings)
    for embedding in embeddings:
        if embedding.is_closed:
            raise ClosedError(f"embedding {embedding.name!r} was closed; write its metrics before close")
    for embedding in embeddings:
        sections = _read(embedding)
        sections |= {f"tables/{table}": numbers for table, numbers in sections.pop("tables", {}).items()}
        for section, numbers in sections.items():
            for name, value in numbers.items():
                x = sections["table"]["step"] if step is None else step
                writer.add_scalar(f"{embedding.name}/{section}/{name}", value, x)


def _check_embeddings(embeddings: Sequence[Any]) -> None:
    for embedding in embeddings:
        if not isinstance(embedding, MultiTableMultiColumnEmbedding):
            raise InputError(f"embeddings: got {type(embedding).__name__}; give each embedding as a separate argument")
    for name, count in Counter(embedding.name for embedding in embeddings).items():
        if count > 1:
            raise InputError(
                f"embeddings: {count} have the name {name!r}, so their series would be the same; give them different "
                "names"
            )


def _read(embedding: MultiTableMultiColumnEmbedding, seconds: float = LOCK_TIMEOUT) -> dict[str, dict[str, Any]]:
    """Return an open embedding's metrics, else {}. Warns if the embedding failed. Never opens a store."""
    try:
        return embedding.metrics_within(seconds) if embedding.is_open and not embedding.has_pending_rows else {}
    except ClosedError:  # another thread closed the embedding
        return {}
    except TierbedError as error:
        warnings.warn(f"no metrics of embedding {embedding.name!r}: {error}", RuntimeWarning, stacklevel=3)
        return {}


def _import_prometheus() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise OptionError("Prometheus metrics need prometheus_client: pip install 'tierbed[metrics]'") from error
    return prometheus_client
