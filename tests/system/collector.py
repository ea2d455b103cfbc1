"""A collector of spans, as a process of its own: takes OTLP over HTTP and writes each span to
standard output as a line of JSON, behind a first line with its port. Arguments: none."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest.FromString(body)
        for part in request.resource_spans:
            resource = attributes(part.resource.attributes)
            for scope in part.scope_spans:
                for span in scope.spans:
                    tell({"path": self.path, "resource": resource, **described(span)})
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def described(span: Span) -> dict[str, object]:
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "begin_ns": span.start_time_unix_nano,
        "end_ns": span.end_time_unix_nano,
        "is_error": span.status.code == 2,
        "attributes": attributes(span.attributes),
    }


def attributes(pairs: "list[KeyValue]") -> dict[str, object]:
    return {pair.key: plain(pair.value) for pair in pairs}


def plain(value: object) -> object:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [plain(one) for one in found.values] if kind == "array_value" else found


def tell(line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Handler)
    tell(server.server_port)
    server.serve_forever()
