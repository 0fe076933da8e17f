//! Recorded steps of mixture-of-experts models. The buffers of a step are separated into dynamic buffers, whose size
//! depends on the data, and all others.
//!
//! The tables have the sizes of buffers but not their names. So dynamic buffers are recognized by the sizes of buffers
//! that are allocated one after another. Elements are bf16 (2 bytes). `D` is the width of the model, and `FF` is the
//! width inside an expert. The workspaces of matrix products are left out. Two sequences of sizes are searched:
//!
//! - the forward of an expert with `rows` rows: four buffers of `2 · FF · rows` bytes (gate, up, silu, product), and
//!   then one of `2 · D · rows` bytes;
//! - the dispatch of `rows` rows to the experts of a rank: `2 · D · rows` bytes, `8 · rows` bytes (indices), and
//!   `2 · D · rows` bytes.
//!
//! Each sequence that is found gives a number of rows. A row has `2 · FF` or `2 · D` bytes, or 8 or 2 bytes (an index
//! or a weight). Every buffer whose size is the number of rows times such a width is dynamic. The exception is a size
//! that occurs more often than the experts can need it. Such a size is static, because some static buffers happen to
//! have the same number of rows.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use gapless_alloc::arena::Request;
use gapless_alloc::{Buffer, BufferId, Label, Problem, Role, csv};
use gapless_testing::few;
use serde_json::Value;

/// One table, with its dynamic buffers separated.
pub struct Recorded {
    pub name: String,
    /// The table as recorded.
    pub whole: Problem,
    /// Buffers whose size depends on the data, in order of birth.
    pub dynamic: Vec<BufferId>,
    /// The other buffers, at multiples of 512.
    pub fixed: Problem,
    /// The requests for the dynamic buffers. Request `index` is for the buffer `dynamic[index]`.
    pub requests: Vec<Request>,
}

impl Recorded {
    /// Bytes that request `index` asked for when it was recorded.
    pub fn bytes(&self, index: usize) -> u64 {
        self.whole.buffer(self.dynamic[index]).bytes
    }
}

/// Visits the recordings of models with experts, the smallest first: single steps, and whole runs if they are
/// available.
pub fn each(folder: &Path, mut visit: impl FnMut(Recorded)) {
    let manifest: Value = serde_json::from_reader(File::open(folder.join("manifest.json")).unwrap()).unwrap();
    let traces = manifest.as_array().unwrap().iter().filter(|trace| trace["config"]["moe"].is_string());
    let parts = traces.flat_map(|trace| ["iteration", "full"].map(|part| Some((trace, trace.get(part)?))));
    let mut parts: Vec<_> = parts
        .flatten()
        .map(|(trace, part)| {
            let file = part["file"].as_str().unwrap();
            let bytes = std::fs::metadata(folder.join(file)).map_or(0, |metadata| metadata.len());
            (bytes, file, &trace["config"])
        })
        .collect();
    parts.sort_by_key(|&(bytes, file, _)| (bytes, file));
    for &(_, file, config) in few(&parts, 2) {
        let table = csv::read(gapless_testing::open(&folder.join(file)).unwrap()).unwrap();
        visit(taken_apart(file.trim_end_matches(".csv.gz"), config, table.problem));
    }
}

fn taken_apart(name: &str, config: &Value, whole: Problem) -> Recorded {
    let number = |key: &str| config[key].as_u64().unwrap();
    let (width, inner) = (2 * number("D"), 2 * number("FF"));
    let tokens = number("mb") * number("seq");
    let experts = number("E");
    let is_parallel = config["moe"] == "ep";
    let rows = Rows::find(&whole, width, inner);
    let sizes = rows.sizes(&whole, width, inner);
    let mut order: Vec<BufferId> = whole.ids().collect();
    order.sort_by_key(|&id| (whole.buffer(id).lifetime.start, id));
    let is_dynamic = |id: &BufferId| sizes.contains_key(&whole.buffer(*id).bytes);
    let dynamic: Vec<BufferId> = order.into_iter().filter(is_dynamic).collect();
    let request = |&id: &BufferId| {
        let b = whole.buffer(id);
        let (rows_in_it, per_row, is_rank) = sizes[&b.bytes];
        // This rank, one of four, has two of the eight experts, and each token chooses two experts.
        let (balanced, most) = match (is_parallel, is_rank) {
            (true, true) => (2 * tokens, 4 * tokens * 2),
            (true, false) => (tokens, 4 * tokens),
            (false, _) => (2 * tokens / experts, tokens),
        };
        assert!(rows_in_it <= most, "{name}: {rows_in_it} rows where at most {most} can be");
        let label = Label {
            tensor: format!("buffer {}", id.0),
            op: "expert".into(),
            layer: String::new(),
            role: Role::Routing,
        };
        Request::new(b.lifetime.clone(), balanced * per_row, most * per_row)
            .aligned(512)
            .in_rows(per_row)
            .labelled(label)
    };
    let requests = dynamic.iter().map(request).collect();
    let fixed = whole.ids().filter(|id| !is_dynamic(id)).map(|id| whole.buffer(id).clone().aligned(512));
    let fixed = Problem::new(fixed.collect::<Vec<Buffer>>()).unwrap();
    Recorded { name: name.into(), fixed, requests, dynamic, whole }
}

/// The numbers of rows that were found, and how often each was found.
struct Rows {
    /// Rows of single experts.
    experts: BTreeMap<u64, usize>,
    /// Rows of all experts on a rank.
    ranks: BTreeMap<u64, usize>,
}

impl Rows {
    /// Finds experts and dispatches by their shape.
    fn find(whole: &Problem, width: u64, inner: u64) -> Self {
        let mut births: Vec<(u64, BufferId)> = whole.ids().map(|id| (whole.buffer(id).lifetime.start, id)).collect();
        births.sort_unstable();
        // Workspaces of matrix products live for one tick.
        let is_workspace = |b: &Buffer| b.bytes == 8_519_680 && b.lifetime.end - b.lifetime.start == 1;
        let buffers = births.iter().map(|&(_, id)| whole.buffer(id)).filter(|b| !is_workspace(b));
        let sizes: Vec<u64> = buffers.map(|b| b.bytes).collect();
        let mut rows = Self { experts: BTreeMap::new(), ranks: BTreeMap::new() };
        for window in sizes.windows(5) {
            let count = window[0] / inner;
            if count > 0 && window[..4].iter().all(|&bytes| bytes == count * inner) && window[4] == count * width {
                *rows.experts.entry(count).or_default() += 1;
            }
            let count = window[1] / 8;
            if count > 0 && window[..3] == [count * width, count * 8, count * width] {
                *rows.ranks.entry(count).or_default() += 1;
            }
        }
        rows
    }

    /// The dynamic sizes: rows, bytes per row, and whether the rows are those of a whole rank.
    fn sizes(&self, whole: &Problem, width: u64, inner: u64) -> BTreeMap<u64, (u64, u64, bool)> {
        /// Most buffers of one width that an expert has, including its backward and recomputation.
        const USES: usize = 16;
        let mut count: BTreeMap<u64, usize> = BTreeMap::new();
        whole.buffers().iter().for_each(|b| *count.entry(b.bytes).or_default() += 1);
        let mut sizes = BTreeMap::new();
        // In a loop over experts, each expert picks its rows by its own indices (8 bytes) and weights (2 bytes).
        let own: &[u64] = if self.ranks.is_empty() { &[inner, width, 8, 2] } else { &[inner, width] };
        let experts = self.experts.iter().flat_map(|(&rows, &found)| own.iter().map(move |&w| (rows, found, w, false)));
        let ranks = self.ranks.iter().flat_map(|(&rows, &found)| [width, 8].map(|w| (rows, found, w, true)));
        let mut uses: BTreeMap<u64, usize> = BTreeMap::new();
        for (rows, found, per_row, is_rank) in experts.chain(ranks) {
            *uses.entry(rows * per_row).or_default() += USES * found;
            sizes.insert(rows * per_row, (rows, per_row, is_rank));
        }
        sizes.retain(|bytes, _| count.get(bytes).is_some_and(|count| *count <= uses[bytes]));
        sizes
    }
}
