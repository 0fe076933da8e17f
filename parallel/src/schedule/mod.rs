//! Pipeline schedules, one file each, and the trait that they implement.

mod automatic;
mod dual_pipe_v;
mod gap_filling;
mod gpipe;
mod interleaved;
mod interleaved_zero_bubble;
mod layered_accumulation;
mod looped_breadth_first;
mod one_f_one_b;
mod rank_order;
mod searched_zb;
mod searched_zbv;
mod tabulated;
mod v_half;
mod v_min;
mod v_one_f_one_b;
mod v_pattern;
mod zb_h1;
mod zb_h2;
mod zbv;

pub use automatic::Automatic;
pub use dual_pipe_v::DualPipeV;
pub use gap_filling::Saved;
pub use gpipe::GPipe;
pub use interleaved::Interleaved;
pub use interleaved_zero_bubble::InterleavedZeroBubble;
pub use layered_accumulation::{LayeredAccumulation, ModularPipeline};
pub use looped_breadth_first::LoopedBreadthFirst;
pub use one_f_one_b::OneForwardOneBackward;
pub use searched_zb::SearchedZb;
pub use searched_zbv::SearchedZbv;
pub use tabulated::{Tabulated, read_table_file};
pub use v_half::VHalf;
pub use v_min::VMin;
pub use v_one_f_one_b::VOneForwardOneBackward;
pub use zb_h1::ZbH1;
pub use zb_h2::ZbH2;
pub use zbv::Zbv;

use std::path::Path;
use std::sync::{PoisonError, RwLock};

use crate::{Action, Cell, Error};

/// The size of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Pipeline ranks, P.
    pub ranks: u32,
    /// Chunks (stages) per rank, V.
    pub chunks: u32,
    /// Micro-batches per step, M.
    pub micro_batches: u32,
}

/// The assignment of stages to ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Rank r owns stages r, P + r, 2P + r, …: a micro-batch goes around all ranks once per chunk.
    Loop,
    /// Rank r owns stages r and 2P − 1 − r: a micro-batch goes down the ranks and comes back, so that the loss is
    /// computed on the rank at which the batch enters.
    V,
}

impl Placement {
    /// Returns the stage that is chunk `chunk` of rank `rank`, in a pipeline of `ranks` ranks.
    pub fn stage(self, ranks: u32, rank: u32, chunk: u32) -> u32 {
        match self {
            Self::V if chunk % 2 == 1 => (chunk + 1) * ranks - 1 - rank,
            Self::Loop | Self::V => chunk * ranks + rank,
        }
    }

    /// Returns the rank that runs `stage`, in a pipeline of `ranks` ranks.
    pub fn owner(self, ranks: u32, stage: u32) -> u32 {
        match (self, stage / ranks, stage % ranks) {
            (Self::V, chunk, place) if chunk % 2 == 1 => ranks - 1 - place,
            (Self::Loop | Self::V, _, place) => place,
        }
    }
}

/// An order of actions for every rank. You can implement this trait for your own schedule; checker, simulator and
/// passes take any table. [`register`] gives the schedule to everything that names schedules.
///
/// ```
/// use gapless_parallel::{Action, Error, Kind, Schedule, Sends, Shape, by_name, check, register};
///
/// /// One micro-batch after the other, so that only one is alive at a time.
/// #[derive(Clone)]
/// struct OneByOne;
///
/// impl Schedule for OneByOne {
///     fn name(&self) -> &'static str {
///         "one-by-one"
///     }
///
///     fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error> {
///         let both = |stage, m| [Kind::Forward, Kind::Backward].map(|kind| Action::new(kind, stage, m));
///         let rank = |stage| (0..shape.micro_batches).flat_map(|m| both(stage, m)).collect();
///         Ok((0..shape.ranks).map(rank).collect())
///     }
/// }
///
/// let table = OneByOne.table(&Shape { ranks: 3, chunks: 1, micro_batches: 4 })?;
/// assert_eq!(check(&table, 3, 4, Sends::Blocking), []);
/// register(OneByOne)?;
/// assert_eq!(by_name("one-by-one")?.name(), "one-by-one");
/// # Ok::<(), Error>(())
/// ```
pub trait Schedule {
    /// Returns the name of the schedule on the command line and in reports.
    fn name(&self) -> &'static str;

    /// Returns the compute actions of each rank in order, indexed by rank.
    ///
    /// # Errors
    /// Returns an error if the schedule does not exist for this shape.
    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, Error>;

    /// Returns the actions of [`Schedule::actions`] as cells. Two actions that are meant to run at the same time are
    /// one cell.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Schedule::actions`].
    fn table(&self, shape: &Shape) -> Result<Vec<Vec<Cell>>, Error> {
        let rows = self.actions(shape)?;
        Ok(rows.into_iter().map(|row| row.into_iter().map(Cell::One).collect()).collect())
    }

    /// Returns the assignment of stages to ranks.
    fn placement(&self) -> Placement {
        Placement::Loop
    }

    /// Returns the usual number of stages per rank.
    fn usual_chunks(&self) -> u32 {
        match self.placement() {
            Placement::Loop => 1,
            Placement::V => 2,
        }
    }

    /// Returns the text for which [`by_name`] returns this schedule.
    fn key(&self) -> String {
        self.name().to_owned()
    }
}

/// Returns every rule-based schedule of this crate, in the order in which the documentation lists the schedules.
pub fn all() -> Vec<Box<dyn Schedule + Send + Sync>> {
    vec![
        Box::new(GPipe),
        Box::new(OneForwardOneBackward),
        Box::new(Interleaved::default()),
        Box::new(LoopedBreadthFirst),
        Box::new(ZbH1),
        Box::new(InterleavedZeroBubble),
        Box::new(ZbH2),
        Box::new(Zbv),
        Box::new(VHalf),
        Box::new(VMin),
        Box::new(VOneForwardOneBackward),
        Box::new(DualPipeV),
        Box::new(LayeredAccumulation),
        Box::new(ModularPipeline),
    ]
}

/// Returns the schedules that search an order for given costs, here with equal costs.
fn cost_based() -> [Box<dyn Schedule + Send + Sync>; 3] {
    [Box::new(Automatic::default()), Box::new(SearchedZb::default()), Box::new(SearchedZbv::default())]
}

/// The schedules that the program added with [`register`].
static ADDED: RwLock<Vec<Constructor>> = RwLock::new(Vec::new());

type Constructor = Box<dyn Fn() -> Box<dyn Schedule + Send + Sync> + Send + Sync>;

/// Adds a schedule, so that [`by_name`] finds it by its [`Schedule::name`], and run files and sweeps can name it.
///
/// # Errors
/// Returns [`Error::Name`] if the name is that of another schedule or of a file.
pub fn register<S: Schedule + Clone + Send + Sync + 'static>(schedule: S) -> Result<(), Error> {
    let mut added = ADDED.write().unwrap_or_else(PoisonError::into_inner);
    let name = schedule.name();
    if name.ends_with(".csv") || known(&added).any(|other| other.name() == name) {
        return Err(Error::Name { name });
    }
    added.push(Box::new(move || Box::new(schedule.clone())));
    Ok(())
}

/// Returns every schedule that has a name, given those that were added.
fn known(added: &[Constructor]) -> impl Iterator<Item = Box<dyn Schedule + Send + Sync>> {
    all().into_iter().chain(cost_based()).chain(added.iter().map(|new| new()))
}

/// Returns the schedule with this name: a rule-based one, or [`Automatic`], [`SearchedZb`] or [`SearchedZbv`] with
/// equal costs, or one that was added with [`register`]. A name that ends in `.csv` is the path of a table
/// ([`Tabulated`]).
///
/// # Errors
/// Returns [`Error::Unknown`], which lists the known names, if no schedule has this name, and the errors of
/// [`Tabulated::read`].
pub fn by_name(name: &str) -> Result<Box<dyn Schedule + Send + Sync>, Error> {
    if name.ends_with(".csv") {
        return Ok(Box::new(Tabulated::read(Path::new(name))?));
    }
    let added = ADDED.read().unwrap_or_else(PoisonError::into_inner);
    known(&added).find(|schedule| schedule.name() == name).ok_or_else(|| {
        let known: Vec<&str> = known(&added).map(|schedule| schedule.name()).collect();
        Error::Unknown { name: name.to_owned(), known: known.join(", ") }
    })
}

impl Shape {
    /// The largest [`Self::extent`] for which tables are generated. Such a table takes some hundred megabytes and some
    /// seconds.
    pub const MAX_EXTENT: u32 = 1 << 21;

    /// Returns a measure of the work of generating a table: ranks × chunks × (micro-batches + ranks). The second
    /// summand of the last factor is needed because some rules fill and drain the pipeline with as many additional
    /// micro-batches as there are ranks.
    pub fn extent(&self) -> u128 {
        let &Self { ranks, chunks, micro_batches } = self;
        u128::from(ranks) * u128::from(chunks) * (u128::from(micro_batches) + u128::from(ranks))
    }

    fn check(&self, schedule: &'static str) -> Result<(), Error> {
        let &Self { ranks, chunks, micro_batches } = self;
        for (what, value) in [("ranks", ranks), ("chunks", chunks), ("micro-batches", micro_batches)] {
            if value == 0 {
                return Err(Error::Zero { schedule, what });
            }
        }
        self.check_extent(schedule, Self::MAX_EXTENT)
    }

    fn check_extent(&self, schedule: &'static str, most: u32) -> Result<(), Error> {
        let &Self { ranks, chunks, micro_batches } = self;
        if self.extent() > u128::from(most) {
            return Err(Error::TooLarge { schedule, ranks, chunks, micro_batches, most });
        }
        Ok(())
    }

    fn check_chunks(&self, schedule: &'static str, needed: u32) -> Result<(), Error> {
        self.check(schedule)?;
        if self.chunks == needed { Ok(()) } else { Err(Error::Chunks { schedule, needed, chunks: self.chunks }) }
    }
}
