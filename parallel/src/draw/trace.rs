//! A timeline as a trace in Chrome's format, which Perfetto reads too.

use serde_json::{Value, json};

use super::label;
use crate::{Cell, Kind, Timeline};

impl Timeline {
    /// Returns a trace with one track per rank, and one counter per rank for the number of live activations. A tick is
    /// shown as a microsecond. Communication that takes no time is shown as an instant.
    pub fn trace(&self) -> String {
        let mut events = Vec::new();
        for (rank, spans) in self.ranks.iter().enumerate() {
            let name = format!("rank {rank}");
            events.push(json!({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": name}}));
            for span in spans {
                let mut event = json!({
                    "name": label(&span.cell), "cat": category(&span.cell), "pid": 0, "tid": rank, "ts": span.start,
                });
                if span.end > span.start {
                    event["ph"] = "X".into();
                    event["dur"] = (span.end - span.start).into();
                } else {
                    event["ph"] = "i".into();
                    event["s"] = "t".into();
                }
                let actions: Vec<Value> = span
                    .cell
                    .actions()
                    .map(|action| json!({"stage": action.stage.0, "micro_batch": action.micro_batch.0}))
                    .collect();
                if !actions.is_empty() {
                    event["args"] = json!({"actions": actions});
                }
                events.push(event);
            }
            let name = format!("activations of rank {rank}");
            events.extend(
                self.live(rank).into_iter().map(
                    |(time, live)| json!({"name": name, "ph": "C", "pid": 0, "ts": time, "args": {"alive": live}}),
                ),
            );
        }
        json!({"traceEvents": events}).to_string()
    }
}

fn category(cell: &Cell) -> &'static str {
    match cell {
        Cell::Overlap(..) => "overlapped",
        Cell::Communicate(_) => "communication",
        Cell::Update(_) => "update",
        Cell::One(action) => match action.kind {
            Kind::Forward => "forward",
            Kind::Backward => "backward",
            Kind::BackwardInput => "input gradient",
            Kind::BackwardWeight => "weight gradient",
        },
    }
}
