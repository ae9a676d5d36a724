"""Train a model, publish it while it trains, and serve it in other processes over HTTP.

    python examples/serve.py --data ml-100k

Without --data, the script trains on a synthetic click log. It publishes each version as float32 and as int8. A server
process for each folder loads the exported model and follows the versions. At the end, the script prints the servers'
AUC and how long a request for one film takes.
"""

from __future__ import annotations

import argparse
import http.client
import json
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from movielens import DeepFM, TrainGraph, batches, make_embedding
from movielens_data import Log, auc, read_log, split
from movielens_synthetic import synthetic_log
from torch import nn

from tierbed import MultiTableEmbedding, make_host_mem_store_options
from tierbed.serving import freeze, load_program, open_served

ENCODINGS = ("float32", "int8")


class Ranker(nn.Module):
    """The probability of a click. Its parts have the same names as in the graph, so weights are found by name."""

    def __init__(self, embedding: MultiTableEmbedding, model: nn.Module, table_ids: torch.Tensor) -> None:
        super().__init__()
        self.embedding, self.model = embedding, model
        self.register_buffer("table_ids", table_ids, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(self.embedding(ids, self.table_ids), ids).sigmoid()


def serve(folder: Path) -> None:
    """Answer requests with a version's scores, and look for a newer version every 100 ms."""
    torch.set_num_threads(1)
    served = open_served(folder)
    ranker = load_program(folder / "ranker.pt2", served)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with torch.inference_mode():
                answer = json.dumps({"version": served.version, "scores": ranker(torch.tensor(ids)).tolist()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    served.follow(0.1)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


class Client:
    """A server process and a connection to it."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, "--serve", str(folder)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.connection = http.client.HTTPConnection("127.0.0.1", int(self.process.stdout.readline()))

    def ask(self, ids: torch.Tensor) -> Any:
        self.connection.request("POST", "/", json.dumps(ids.tolist()))
        return json.loads(self.connection.getresponse().read())

    def close(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.communicate()


def report(client: Client, encoding: str, log: Log, rows: torch.Tensor, version: int) -> None:
    """Wait until the server has the version, then print its AUC and its times."""
    while client.ask(log.ids[:2])["version"] < version:
        time.sleep(0.05)
    scores = [score for part in rows.split(256) for score in client.ask(log.ids[part])["scores"]]
    times = []
    for row in rows[:1000]:
        began = time.perf_counter()
        client.ask(log.ids[row : row + 1])
        times.append(1e3 * (time.perf_counter() - began))
    p50, p99 = sorted(times)[len(times) // 2], sorted(times)[len(times) * 99 // 100]
    area = auc(log.labels[rows], torch.tensor(scores))
    print(f"{encoding}: version {version}, AUC {area:.5f}, a request takes {p50:.2f} ms (p99 {p99:.2f} ms)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of MovieLens 100K or 1M; default: a synthetic log")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--publish-every", type=int, default=100, help="steps between two versions")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    torch.manual_seed(0)
    log = synthetic_log() if args.data is None else read_log(args.data)
    train_rows, _, test_rows = split(len(log.labels))
    model, clients = DeepFM(16), dict[str, Client]()
    with tempfile.TemporaryDirectory() as path, make_embedding(make_host_mem_store_options(), 16) as embedding:
        folders, graph = {name: Path(path, name) for name in ENCODINGS}, TrainGraph(embedding, model, lr=0.05)

        def publish() -> dict[str, Any]:
            return {name: graph.publish(folder, name) for name, folder in folders.items()}

        for _ in range(args.epochs):
            order = train_rows[torch.randperm(len(train_rows))]
            for step, batch in enumerate(batches(log, order, args.batch_size), 1):
                graph(*batch)
                if step % args.publish_every:
                    continue
                handles = publish()  # in the background, while training goes on
                for name in () if clients else ENCODINGS:  # once: other processes need no code of the model
                    print(f"step {step}: {handles[name].wait()}")
                    with open_served(folders[name]) as served:
                        frozen = freeze(Ranker(embedding, model, log.table_ids), served)
                        shapes = ({0: torch.export.Dim.AUTO},)
                        program = torch.export.export(frozen, (log.ids[:2],), dynamic_shapes=shapes)
                    torch.export.save(program, folders[name] / "ranker.pt2")
                    clients[name] = Client(folders[name])
        versions = {name: handle.wait() for name, handle in publish().items()}
        for name, client in clients.items():
            print(versions[name])
            report(client, name, log, test_rows, versions[name].version)
            client.close()


if __name__ == "__main__":
    main()
