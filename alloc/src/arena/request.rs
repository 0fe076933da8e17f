//! What the arena is asked for: ticks known, size not.
//!
//! In: what a compiler knows of a buffer whose size the data decides. Out: checked requests. Never: a place.

use crate::{Error, Label, Lifetime, Role};

/// Index of a request in its [`ArenaPlan`](super::ArenaPlan).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u32);

impl RequestId {
    /// The id as a table index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A buffer whose size is known only when the instruction that writes it first runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Ticks during which its bytes must not be touched by another.
    pub ticks: Lifetime,
    /// Bytes when routing is balanced.
    pub balanced: u64,
    /// Bytes that it can never exceed.
    pub most: u64,
    /// The offset is a multiple of this; at least 1. 64 on CPUs, 512 on devices.
    pub alignment: u64,
    /// Bytes of one row, so that messages can speak of rows; 0 where there are none.
    pub bytes_per_row: u64,
    /// How sure it must be of its room.
    pub need: Need,
    /// The names that messages and reports show.
    pub label: Label,
}

/// How sure a request must be of its room.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Need {
    /// As the [`Reserve`] says.
    #[default]
    Usual,
    /// It has room at its bound, whatever the [`Reserve`] promises to others.
    Certain,
    /// Who asks can do without. It is promised what the [`Reserve`] says, and gets more where that is in nobody's way:
    /// [`Arena::offer`](super::Arena::offer).
    Optional,
}

impl Request {
    /// A request at multiples of 64, without rows or names.
    pub fn new(ticks: Lifetime, balanced: u64, most: u64) -> Self {
        let label = Label { tensor: String::new(), op: String::new(), layer: String::new(), role: Role::Routing };
        Self { ticks, balanced, most, alignment: 64, bytes_per_row: 0, need: Need::Usual, label }
    }

    /// The same request at multiples of `alignment`.
    pub fn aligned(self, alignment: u64) -> Self {
        Self { alignment, ..self }
    }

    /// The same request in rows of `bytes_per_row`.
    pub fn in_rows(self, bytes_per_row: u64) -> Self {
        Self { bytes_per_row, ..self }
    }

    /// The same request, as sure of its room as that.
    pub fn needed(self, need: Need) -> Self {
        Self { need, ..self }
    }

    /// The same request with names.
    pub fn labelled(self, label: Label) -> Self {
        Self { label, ..self }
    }
}

/// How large the arena's own range is, above what the static plan takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reserve {
    /// As large as it takes to serve every request at `factor` times its balanced size (at most its bound), whatever is
    /// idle in the static plan counted in. A step whose requests all stay within that never overflows.
    Balanced {
        /// 1 for balanced sizes.
        factor: f64,
    },
    /// As large as it takes to serve every request at its bound: never overflows.
    Worst,
    /// So many bytes. Nothing is promised.
    Bytes(u64),
}

impl Reserve {
    /// What is promised to a request, in bytes; `None` where nothing is.
    pub(super) fn promise(self, request: &Request) -> Option<u64> {
        match self {
            Self::Balanced { .. } if request.need == Need::Certain => Some(request.most),
            Self::Balanced { factor } => Some(((request.balanced as f64 * factor).ceil() as u64).min(request.most)),
            Self::Worst => Some(request.most),
            Self::Bytes(_) => None,
        }
    }
}

/// What the arena is built with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArenaOptions {
    /// Size of its own range.
    pub reserve: Reserve,
    /// First byte of its own range; `None` for the end of the static plan.
    pub base: Option<u64>,
    /// What the planner may spend on homes that it cannot prove to be lowest, in its own unit of work.
    pub work: u64,
}

impl Default for ArenaOptions {
    fn default() -> Self {
        Self { reserve: Reserve::Balanced { factor: 1.25 }, base: None, work: 20_000_000 }
    }
}

impl ArenaOptions {
    /// These options with a reserve of this size.
    pub fn with_reserve(reserve: Reserve) -> Self {
        Self { reserve, ..Self::default() }
    }
}

/// All requests are sound and in order of their first tick; offsets can be multiples of the returned grain.
pub(super) fn checked(requests: &[Request], options: &ArenaOptions) -> Result<u64, Error> {
    if let Reserve::Balanced { factor } = options.reserve
        && !(factor.is_finite() && factor >= 0.0)
    {
        return Err(Error::Factor { factor });
    }
    if u32::try_from(requests.len()).is_err() {
        return Err(Error::TooManyBuffers { buffers: requests.len() });
    }
    let mut grain = 1;
    for (request, r) in requests.iter().enumerate() {
        let fail = |what| Err(Error::Request { request, tensor: r.label.tensor.clone(), what });
        if r.ticks.start >= r.ticks.end {
            return fail("has an empty lifetime; it must end after it starts");
        }
        if !r.alignment.is_power_of_two() {
            return fail("has an alignment that is not a power of two");
        }
        if r.balanced > r.most {
            return fail("has a balanced size above its bound");
        }
        if request > 0 && requests[request - 1].ticks.start > r.ticks.start {
            return fail("starts before the preceding request; requests come in order of their first tick");
        }
        grain = grain.max(r.alignment);
    }
    Ok(grain)
}
