// Writes the bytes that the OpenTelemetry Collector's own marshalers make of known logs, metrics
// and traces, for ../otel.json, which tests/spark/test_docs.py reads as the how-to does:
//
//	go mod tidy && go run . > ../otel.json
package main

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"time"

	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/plog"
	"go.opentelemetry.io/collector/pdata/pmetric"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

var at = pcommon.NewTimestampFromTime(time.Date(2026, 1, 31, 3, 0, 0, 0, time.UTC))

func describe(resource pcommon.Resource) {
	resource.Attributes().PutStr("service.name", "shop")
	resource.Attributes().PutInt("process.pid", 4711)
}

func main() {
	logs := plog.NewLogs()
	ofLogs := logs.ResourceLogs().AppendEmpty()
	describe(ofLogs.Resource())
	record := ofLogs.ScopeLogs().AppendEmpty().LogRecords().AppendEmpty()
	record.SetTimestamp(at)
	record.SetSeverityText("WARN")
	record.SetSeverityNumber(plog.SeverityNumberWarn)
	record.Body().SetStr("basket is empty, grüße")
	record.Attributes().PutBool("retry", true)

	metrics := pmetric.NewMetrics()
	ofMetrics := metrics.ResourceMetrics().AppendEmpty()
	describe(ofMetrics.Resource())
	scope := ofMetrics.ScopeMetrics().AppendEmpty()
	scope.Scope().SetName("shop/orders")
	sum := scope.Metrics().AppendEmpty()
	sum.SetName("orders")
	sum.SetUnit("{order}")
	sum.SetEmptySum().SetIsMonotonic(true)
	point := sum.Sum().DataPoints().AppendEmpty()
	point.SetTimestamp(at)
	point.SetIntValue(42)
	gauge := scope.Metrics().AppendEmpty()
	gauge.SetName("temperature")
	reading := gauge.SetEmptyGauge().DataPoints().AppendEmpty()
	reading.SetTimestamp(at)
	reading.SetDoubleValue(-1.5)

	traces := ptrace.NewTraces()
	ofTraces := traces.ResourceSpans().AppendEmpty()
	describe(ofTraces.Resource())
	span := ofTraces.ScopeSpans().AppendEmpty().Spans().AppendEmpty()
	span.SetTraceID([16]byte{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16})
	span.SetSpanID([8]byte{1, 2, 3, 4, 5, 6, 7, 8})
	span.SetName("checkout")
	span.SetStartTimestamp(at)
	span.SetEndTimestamp(at + 1_000_000)

	made := map[string]string{}
	add := func(signal string, data []byte, err error) {
		if err != nil {
			panic(err)
		}
		made[signal] = hex.EncodeToString(data)
	}
	data, err := (&plog.ProtoMarshaler{}).MarshalLogs(logs)
	add("logs", data, err)
	data, err = (&pmetric.ProtoMarshaler{}).MarshalMetrics(metrics)
	add("metrics", data, err)
	data, err = (&ptrace.ProtoMarshaler{}).MarshalTraces(traces)
	add("traces", data, err)
	encoder := json.NewEncoder(os.Stdout)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(made); err != nil {
		panic(err)
	}
}
