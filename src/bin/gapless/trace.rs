//! `gapless train --trace`: writes spans to a file for chrome://tracing and Perfetto.
//!
//! In: spans and events of this program's crates. Out: a JSON list with one line for each span that has ended and for
//! each event, up to the maximum size of the file. The file never has an incomplete line, and every error is reported.

use std::cell::{Cell, RefCell};
use std::fmt::Debug;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use serde_json::{Map, Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

/// Maximum size of a trace; viewers cannot open larger ones.
pub const MAX_BYTES: u64 = 256 << 20;

/// A trace file that is being written. Clones write to the same file.
#[derive(Clone)]
pub struct Trace {
    begun: Instant,
    output: Arc<Mutex<Output>>,
}

struct Output {
    out: BufWriter<Box<dyn Write + Send>>,
    /// Number of bytes that may still be written.
    left: u64,
    lines: u64,
    left_out: u64,
    error: Option<io::Error>,
}

/// The end of the JSON list.
const END: &[u8] = b"\n]\n";

impl Trace {
    /// Creates the file, or replaces it.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self::new(File::create(path)?, MAX_BYTES))
    }

    fn new(out: impl Write + Send + 'static, most: u64) -> Self {
        let out: BufWriter<Box<dyn Write + Send>> = BufWriter::new(Box::new(out));
        let output = Output { out, left: most.saturating_sub(END.len() as u64), lines: 0, left_out: 0, error: None };
        Self { begun: Instant::now(), output: Arc::new(Mutex::new(output)) }
    }

    /// Ends the list. Returns the number of spans and events that did not fit.
    pub fn finish(&self) -> io::Result<u64> {
        let mut output = self.output();
        if let Some(error) = output.error.take() {
            return Err(error);
        }
        let begin: &[u8] = if output.lines == 0 { b"[" } else { b"" };
        output.out.write_all(begin)?;
        output.out.write_all(END)?;
        output.out.flush()?;
        Ok(output.left_out)
    }

    fn output(&self) -> MutexGuard<'_, Output> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes an object of the list, and adds the thread, the time and the name.
    fn write(&self, metadata: &Metadata<'_>, start: Instant, mut object: Value) {
        let (thread, is_new) = this_thread();
        let mut output = self.output();
        if is_new {
            let name = std::thread::current().name().map_or_else(|| thread.to_string(), str::to_owned);
            output.write(&json!({"ph": "M", "pid": 1, "tid": thread, "name": "thread_name", "args": {"name": name}}));
        }
        object["pid"] = 1.into();
        object["tid"] = thread.into();
        object["ts"] = microseconds(start.saturating_duration_since(self.begun)).into();
        object["name"] = metadata.name().into();
        object["cat"] = metadata.target().into();
        output.write(&object);
    }
}

impl Output {
    fn write(&mut self, object: &Value) {
        let line = format!("{}{object}", if self.lines == 0 { "[\n" } else { ",\n" });
        if self.error.is_some() || self.left_out > 0 || line.len() as u64 > self.left {
            self.left_out += 1;
            return;
        }
        self.left -= line.len() as u64;
        self.lines += 1;
        self.error = self.out.write_all(line.as_bytes()).err();
    }
}

fn microseconds(time: std::time::Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// Returns the number of this thread, and whether this is the first call on this thread.
fn this_thread() -> (u64, bool) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    thread_local! {
        static NUMBER: Cell<Option<u64>> = const { Cell::new(None) };
    }
    NUMBER.with(|number| match number.get() {
        Some(known) => (known, false),
        None => {
            let new = NEXT.fetch_add(1, Ordering::Relaxed);
            number.set(Some(new));
            (new, true)
        }
    })
}

thread_local! {
    /// The spans that this thread has entered but not left, each with the time of entry.
    static ENTERED: RefCell<Vec<(Id, Instant)>> = const { RefCell::new(Vec::new()) };
}

/// The fields of a span or event, as JSON.
#[derive(Default)]
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), value.into());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}").into());
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Trace {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().replace(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_enter(&self, id: &Id, _: Context<'_, S>) {
        ENTERED.with_borrow_mut(|entered| entered.push((id.clone(), Instant::now())));
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let entered = ENTERED.with_borrow_mut(|entered| {
            let at = entered.iter().rposition(|(other, _)| other == id)?;
            Some(entered.remove(at).1)
        });
        if let Some((start, span)) = entered.zip(context.span(id)) {
            let fields = span.extensions().get::<Fields>().map(|fields| fields.0.clone()).unwrap_or_default();
            let object = json!({"ph": "X", "dur": microseconds(start.elapsed()), "args": fields});
            self.write(span.metadata(), start, object);
        }
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.write(event.metadata(), Instant::now(), json!({"ph": "i", "s": "t", "args": fields.0}));
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    /// A writer that keeps everything in memory, for inspection.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Writes 50 pairs of nested spans to a trace of at most `most` bytes. Returns the lines of the trace, the number
    /// of omitted spans, and the size of the trace.
    fn traced(most: u64) -> (Vec<Value>, u64, u64) {
        let written = Written::default();
        let trace = Trace::new(written.clone(), most);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(trace.clone()), || {
            for step in 0..50u64 {
                let _outer = tracing::info_span!("outer", step, what = "line\nend").entered();
                let _inner = tracing::info_span!("inner").entered();
            }
            tracing::warn!("over");
        });
        let left_out = trace.finish().unwrap();
        let bytes = written.0.lock().unwrap().clone();
        (serde_json::from_slice(&bytes).unwrap(), left_out, bytes.len() as u64)
    }

    #[test]
    fn spans_and_events_are_written_as_they_end() {
        let (lines, left_out, _) = traced(1 << 20);
        let lines_named = |name: &str| lines.iter().filter(|line| line["name"] == *name).collect::<Vec<_>>();
        let (outer, inner) = (lines_named("outer"), lines_named("inner"));
        assert_eq!((outer.len(), inner.len(), left_out), (50, 50, 0));
        assert_eq!((&outer[7]["args"]["step"], &outer[7]["args"]["what"]), (&json!(7), &json!("line\nend")));
        let [start, end] = [outer[7], inner[7]].map(|span| {
            let number = |key: &str| span[key].as_f64().unwrap();
            (number("ts"), number("ts") + number("dur"))
        });
        assert!(start.0 <= end.0 && end.1 <= start.1, "the inner one is within the outer");
        assert_eq!(lines.last().unwrap()["args"]["message"], "over");
    }

    #[test]
    fn a_full_trace_is_a_whole_one() {
        for most in [0, 2, 5, 300, 1000, 5000] {
            let (lines, left_out, bytes) = traced(most);
            assert!(left_out > 0 && bytes <= most.max(4), "{most}: {bytes} bytes, {left_out} left out");
            let others = lines.iter().filter(|line| line["ph"] != "M").count() as u64;
            assert!(others + left_out >= 101, "{most}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_write_that_fails_is_told() {
        let trace = Trace::create("/dev/full".as_ref()).unwrap();
        assert_eq!(trace.finish().unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
