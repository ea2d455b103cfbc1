"""A collector of spans, as a process of its own: takes OTLP and writes each span to standard output
as a line of JSON, behind a first line with its port. Arguments: none for HTTP, "grpc" for that."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        tell_all(ExportTraceServiceRequest.FromString(body), self.path)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def tell_all(request: ExportTraceServiceRequest, path: str) -> None:
    for part in request.resource_spans:
        resource = attributes(part.resource.attributes)
        for scope in part.scope_spans:
            for span in scope.spans:
                tell({"path": path, "resource": resource, **described(span)})


def serve_grpc() -> None:
    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    class Servicer(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):
            tell_all(request, "grpc")
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Servicer(), server)
    tell(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


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
    if sys.argv[1:] == ["grpc"]:
        serve_grpc()
    server = HTTPServer(("127.0.0.1", 0), Handler)
    tell(server.server_port)
    server.serve_forever()
