//! When everything happens, and what is alive meanwhile, if every action took a known time.

use std::collections::BTreeMap;

use crate::{Action, Cell, Kind, MicroBatch, StageId};

/// Ticks that one chunk's action takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Costs {
    /// F.
    pub forward: u64,
    /// I.
    pub backward_input: u64,
    /// W.
    pub backward_weight: u64,
    /// A forward and a whole backward side by side; with a split one, as much less as the split one is shorter.
    pub overlapped: u64,
    /// From the end of an action to where a neighbouring rank can use its result.
    pub transfer: u64,
}

/// One tick for each of F, I and W, three for a pair, none between ranks.
impl Default for Costs {
    fn default() -> Self {
        Self { forward: 1, backward_input: 1, backward_weight: 1, overlapped: 3, transfer: 0 }
    }
}

/// A cell and when it runs, in ticks, half-open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// What runs.
    pub cell: Cell,
    /// From here,
    pub start: u64,
    /// until just before here.
    pub end: u64,
}

/// What a table comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timeline {
    /// The spans of each rank, in order.
    pub ranks: Vec<Vec<Span>>,
}

/// A rank that waits for ever; [`crate::check()`] says why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank} waits for ever at {cell}; the checker says what it waits for")]
pub struct Stuck {
    /// Which rank.
    pub rank: usize,
    /// Where.
    pub cell: Cell,
}

/// Starts every cell as soon as its rank is free and its inputs are there. Sends are buffered; communication cells take
/// no time.
///
/// # Errors
/// When a cell's inputs are never made.
pub fn simulate(table: &[Vec<Cell>], costs: &Costs) -> Result<Timeline, Stuck> {
    let actions = || table.iter().flatten().flat_map(Cell::actions);
    let last = actions().map(|action| action.stage).max();
    let mut ends: BTreeMap<Done, (usize, u64)> = BTreeMap::new();
    let mut ranks: Vec<Vec<Span>> = vec![Vec::new(); table.len()];
    loop {
        let mut moved = false;
        for (rank, row) in table.iter().enumerate() {
            while let Some(&cell) = row.get(ranks[rank].len()) {
                let free = ranks[rank].last().map_or(0, |span| span.end);
                let needs = cell.actions().flat_map(|action| needs(action, last));
                let arrival =
                    |need| ends.get(&need).map(|&(from, end)| if from == rank { end } else { end + costs.transfer });
                let Some(start) = needs.map(arrival).try_fold(free, |start, end| Some(start.max(end?))) else { break };
                let end = start + duration(&cell, costs);
                ends.extend(cell.actions().map(|action| (Done::of(action), (rank, end))));
                ranks[rank].push(Span { cell, start, end });
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    let stuck =
        table.iter().zip(&ranks).enumerate().find_map(|(rank, (row, spans))| Some((rank, *row.get(spans.len())?)));
    match stuck {
        Some((rank, cell)) => Err(Stuck { rank, cell }),
        None => Ok(Timeline { ranks }),
    }
}

impl Timeline {
    /// From the first start to the last end.
    pub fn makespan(&self) -> u64 {
        self.ranks.iter().flatten().map(|span| span.end).max().unwrap_or_default()
    }

    /// Ticks for which a rank has nothing to do, before the makespan ends.
    pub fn bubble(&self, rank: usize) -> u64 {
        self.makespan() - self.ranks[rank].iter().map(|span| span.end - span.start).sum::<u64>()
    }

    /// Activations alive on a rank, in chunks of one micro-batch, each time their number changes. An activation is
    /// born where its F starts and dies where its W or whole B ends.
    pub fn live(&self, rank: usize) -> Vec<(u64, i64)> {
        let mut changes: BTreeMap<u64, i64> = BTreeMap::new();
        for (span, action) in self.ranks[rank].iter().flat_map(|span| span.cell.actions().map(move |a| (span, a))) {
            match action.kind {
                Kind::Forward => *changes.entry(span.start).or_default() += 1,
                Kind::Backward | Kind::BackwardWeight => *changes.entry(span.end).or_default() -= 1,
                Kind::BackwardInput => {}
            }
        }
        let mut live = 0;
        changes
            .into_iter()
            .map(|(time, change)| {
                live += change;
                (time, live)
            })
            .collect()
    }

    /// The most that [`Timeline::live`] comes to.
    pub fn peak(&self, rank: usize) -> i64 {
        self.live(rank).into_iter().map(|(_, live)| live).max().unwrap_or_default()
    }

    /// One line per rank, one column per tick, as wide as the widest label; idle ticks are dots.
    pub fn gantt(&self) -> String {
        let label = |cell: &Cell| cell.actions().map(|action| action.to_string()).collect::<Vec<_>>().join("+");
        let width = self.ranks.iter().flatten().map(|span| label(&span.cell).len() + 1).max().unwrap_or(1);
        let line = |(rank, spans): (usize, &Vec<Span>)| {
            let mut line = format!("rank {rank} │ ");
            let mut now = 0;
            for span in spans {
                (now..span.start).for_each(|_| line += &format!("{:width$}", "·"));
                line += &format!("{:1$}", label(&span.cell), width * (span.end - span.start) as usize);
                now = span.end;
            }
            (now..self.makespan()).for_each(|_| line += &format!("{:width$}", "·"));
            line.trim_end().to_owned() + "\n"
        };
        self.ranks.iter().enumerate().map(line).collect()
    }

    /// The same as a picture: one row per rank, coloured by kind; what a box is stands in its tooltip.
    pub fn svg(&self) -> String {
        const ROW: u64 = 28;
        const TICK: u64 = 24;
        let (width, height) = (self.makespan() * TICK, self.ranks.len() as u64 * ROW);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"monospace\" \
             font-size=\"9\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#eee\"/>\n"
        );
        for (rank, span) in self.ranks.iter().enumerate().flat_map(|(rank, spans)| spans.iter().map(move |s| (rank, s)))
        {
            let (x, y, width) = (span.start * TICK, rank as u64 * ROW, (span.end - span.start) * TICK);
            let colour = match span.cell {
                Cell::Overlap(..) => "#c9a0dc",
                Cell::Communicate(_) | Cell::Update(_) => "#999999",
                Cell::One(action) => match action.kind {
                    Kind::Forward => "#8ecae6",
                    Kind::Backward => "#90be6d",
                    Kind::BackwardInput => "#b5e48c",
                    Kind::BackwardWeight => "#ffd166",
                },
            };
            svg += &format!(
                "<g><title>{cell} [{start}, {end})</title><rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{ROW}\" \
                 fill=\"{colour}\" stroke=\"white\"/><text x=\"{text_x}\" y=\"{text_y}\">{label}</text></g>\n",
                cell = span.cell,
                start = span.start,
                end = span.end,
                text_x = x + 3,
                text_y = y + ROW / 2 + 3,
                label = span.cell.actions().next().map_or(String::new(), |action| action.to_string()),
            );
        }
        svg + "</svg>\n"
    }
}

/// What others wait for. A whole backward is its input gradient and its weight gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Done {
    Forward(StageId, MicroBatch),
    Input(StageId, MicroBatch),
    Weight(StageId, MicroBatch),
}

impl Done {
    fn of(action: Action) -> Self {
        match action.kind {
            Kind::Forward => Self::Forward(action.stage, action.micro_batch),
            Kind::Backward | Kind::BackwardInput => Self::Input(action.stage, action.micro_batch),
            Kind::BackwardWeight => Self::Weight(action.stage, action.micro_batch),
        }
    }
}

fn needs(action: Action, last: Option<StageId>) -> Vec<Done> {
    let Action { kind, stage, micro_batch } = action;
    let neighbour = match kind {
        Kind::Forward => stage.0.checked_sub(1).map(|above| Done::Forward(StageId(above), micro_batch)),
        Kind::Backward | Kind::BackwardInput if last == Some(stage) => None,
        Kind::Backward | Kind::BackwardInput => Some(Done::Input(StageId(stage.0 + 1), micro_batch)),
        Kind::BackwardWeight => Some(Done::Input(stage, micro_batch)),
    };
    let own = matches!(kind, Kind::Backward | Kind::BackwardInput).then_some(Done::Forward(stage, micro_batch));
    own.into_iter().chain(neighbour).collect()
}

fn duration(cell: &Cell, costs: &Costs) -> u64 {
    let one = |action: Action| match action.kind {
        Kind::Forward => costs.forward,
        Kind::Backward => costs.backward_input + costs.backward_weight,
        Kind::BackwardInput => costs.backward_input,
        Kind::BackwardWeight => costs.backward_weight,
    };
    match *cell {
        Cell::One(action) => one(action),
        Cell::Overlap(_, backward) => {
            costs.overlapped - (costs.backward_input + costs.backward_weight - one(backward)).min(costs.overlapped)
        }
        Cell::Communicate(_) | Cell::Update(_) => 0,
    }
}
