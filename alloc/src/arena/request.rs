//! Requests to the arena: the ticks are known, the size is not.
//!
//! In: the properties of a buffer that a compiler can determine although its size depends on the data. Out: checked
//! requests. Never: an address.

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
    /// Ticks during which no other buffer may touch the bytes of this one.
    pub ticks: Lifetime,
    /// Bytes if routing is balanced.
    pub balanced: u64,
    /// The bound: the most bytes that the buffer can have.
    pub most: u64,
    /// The offset is a multiple of this power of two: 64 on CPUs, 512 on devices.
    pub alignment: u64,
    /// Bytes of one row, so that messages can count rows; 0 if the buffer has no rows.
    pub bytes_per_row: u64,
    /// The room that the arena must guarantee to the buffer.
    pub need: Need,
    /// The names that messages and reports show.
    pub label: Label,
}

/// The room that the arena guarantees to a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Need {
    /// As much as the [`Reserve`] promises.
    #[default]
    Usual,
    /// Room for the request's bound, whatever the [`Reserve`] promises to other requests.
    Certain,
    /// As much as the [`Reserve`] promises, but the caller can do without the buffer.
    /// [`Arena::try_request`](super::Arena::try_request) serves such a request beyond its promise if that takes no room
    /// from other requests.
    Optional,
}

impl Request {
    /// A request aligned to 64 bytes, without rows or names.
    pub fn new(ticks: Lifetime, balanced: u64, most: u64) -> Self {
        let label = Label { tensor: String::new(), op: String::new(), layer: String::new(), role: Role::Routing };
        Self { ticks, balanced, most, alignment: 64, bytes_per_row: 0, need: Need::Usual, label }
    }

    /// The same request with this alignment.
    pub fn aligned(self, alignment: u64) -> Self {
        Self { alignment, ..self }
    }

    /// The same request with rows of `bytes_per_row`.
    pub fn in_rows(self, bytes_per_row: u64) -> Self {
        Self { bytes_per_row, ..self }
    }

    /// The same request with this need.
    pub fn needed(self, need: Need) -> Self {
        Self { need, ..self }
    }

    /// The same request with names.
    pub fn labelled(self, label: Label) -> Self {
        Self { label, ..self }
    }
}

/// The size of the reserve, which is the arena's own address range above the static plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reserve {
    /// Enough for every request at `factor` times its balanced size (at most its bound), together with idle ranges of
    /// the static plan. A step whose requests all stay within these sizes never overflows.
    Balanced {
        /// Multiple of the balanced sizes.
        factor: f64,
    },
    /// Enough to serve every request at its bound, so that no step overflows.
    Worst,
    /// A fixed number of bytes. Nothing is promised.
    Bytes(u64),
}

impl Reserve {
    /// Returns the bytes promised to a request, or `None` if this reserve promises nothing.
    pub(super) fn promise(self, request: &Request) -> Option<u64> {
        match self {
            Self::Balanced { .. } if request.need == Need::Certain => Some(request.most),
            Self::Balanced { factor } => Some(((request.balanced as f64 * factor).ceil() as u64).min(request.most)),
            Self::Worst => Some(request.most),
            Self::Bytes(_) => None,
        }
    }
}

/// Options of an arena.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ArenaOptions {
    /// Size of the reserve.
    pub reserve: Reserve,
    /// First byte of the reserve; `None` for the end of the static plan.
    pub base: Option<u64>,
    /// The work that the planner may spend on placing the homes, in the unit of
    /// [`Options::work`](crate::Options::work). The planner stops early once the homes are proven to lie as low as
    /// possible.
    pub work: u64,
}

impl Default for ArenaOptions {
    fn default() -> Self {
        Self { reserve: Reserve::Balanced { factor: 1.25 }, base: None, work: 20_000_000 }
    }
}

impl ArenaOptions {
    /// The default options with this reserve.
    pub fn with_reserve(reserve: Reserve) -> Self {
        Self { reserve, ..Self::default() }
    }
}

/// Checks that all requests are sound and in order of their first tick. Returns the grain, which is the coarsest
/// alignment: an offset at a multiple of the grain suits every request.
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
