//! Graphs as text, with one node per line. Tests compare this text, and `GAPLESS_DUMP=graph` prints it.
//!
//! ```text
//! v0 tokens: u32[2,4], input
//! v1 embed.weight: f32[16,8], persistent
//! v2 f32[2,4,8] = embedding v1, v0 @ embed, forward, stage 0
//! ```

use std::fmt::{self, Display, Formatter};

use crate::graph::{Graph, Node, Phase, Place, Source, ValueId};

impl Display for Graph {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (id, value) in self.value_ids().map(|id| (id, self.value(id))) {
            let number = id.index();
            match &value.source {
                Source::Persistent { name, .. } => writeln!(f, "v{number} {name}: {}, persistent", Typed(self, id))?,
                Source::Input { name } => writeln!(f, "v{number} {name}: {}, input", Typed(self, id))?,
                Source::Cache { name } => writeln!(f, "v{number} {name}: {}, cache", Typed(self, id))?,
                Source::Constant(constant) => writeln!(f, "v{number} {constant}: {}, constant", Typed(self, id))?,
                Source::Data { name, .. } => writeln!(f, "v{number} {name}: {}, constant", Typed(self, id))?,
                Source::Node { .. } => {}
            }
        }
        self.nodes().iter().try_for_each(|node| writeln!(f, "{}", Line(self, node)))
    }
}

/// Formats the type and shape of a value.
struct Typed<'g>(&'g Graph, ValueId);

impl Display for Typed<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let spec = &self.0.value(self.1).spec;
        let dims: Vec<String> = spec.dims().iter().map(ToString::to_string).collect();
        write!(f, "{}[{}]", spec.dtype.as_str(), dims.join(","))
    }
}

/// Formats a node as one line.
struct Line<'g>(&'g Graph, &'g Node);

impl Display for Line<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(graph, node) = *self;
        for (index, &output) in node.outputs.iter().enumerate() {
            write!(f, "{}v{} {}", if index > 0 { ", " } else { "" }, output.index(), Typed(graph, output))?;
        }
        write!(f, " = {}", node.op.name())?;
        for (index, input) in node.inputs.iter().enumerate() {
            write!(f, "{}v{}", if index > 0 { ", " } else { " " }, input.index())?;
        }
        let phase = match node.phase {
            Phase::Forward => "forward",
            Phase::BackwardInput => "input gradient",
            Phase::BackwardWeight => "weight gradient",
            Phase::Update => "update",
        };
        let layer = if node.layer.is_empty() { "the model" } else { &node.layer };
        write!(f, " @ {layer}, {phase}, ")?;
        match node.place {
            Place::Stage(stage) => write!(f, "stage {}", stage.0),
            Place::Everywhere => f.write_str("everywhere"),
        }
    }
}
