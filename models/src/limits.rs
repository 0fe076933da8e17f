//! Upper limits of a model's extents. Models in use stay far below these limits, and sizes that are computed from
//! extents within the limits do not overflow.

use gapless_engine::{Error, Result};

/// The greatest number of blocks.
pub const MAX_LAYERS: usize = 4096;
/// The greatest number of heads or experts, and the greatest width.
pub const MAX_WIDTH: usize = 1 << 20;
/// The greatest width of a feed-forward layer.
pub const MAX_HIDDEN: usize = 1 << 22;
/// The greatest number of tokens in a vocabulary, and the greatest number of positions.
pub const MAX_TOKENS: usize = 1 << 28;
/// The greatest number of parameters: 2⁴⁸ f32 elements take a petabyte.
pub const MAX_ELEMENTS: u128 = 1 << 48;

/// The checks of a configuration. Only the first violation is recorded.
#[derive(Default)]
pub(crate) struct Checked {
    wrong: Option<(String, &'static str)>,
}

impl Checked {
    /// Checks that an extent is between 1 and `most`.
    pub fn extent(self, name: &str, extent: usize, most: usize) -> Self {
        self.require((1..=most).contains(&extent), || format!("{name} is {extent}, which is not from 1 to {most}"))
    }

    /// Checks that a number is above 0 and that the number and its reciprocal are representable in f32.
    pub fn positive(self, name: &str, x: f64) -> Self {
        let is_sound = x > 0.0 && (x as f32).is_normal() && ((1.0 / x) as f32).is_normal();
        self.require(is_sound, || format!("{name} is {x}, which is not a number above 0 in f32"))
    }

    /// Checks that a probability is at least 0 and below 1.
    pub fn probability(self, name: &str, x: f64) -> Self {
        self.require((0.0..1.0).contains(&x), || format!("{name} is {x}, which is not from 0 to below 1"))
    }

    /// Checks that the number of parameters is at most [`MAX_ELEMENTS`].
    pub fn elements(self, elements: u128) -> Self {
        let why = || format!("it has {elements} parameters, above the maximum of {MAX_ELEMENTS}");
        self.require(elements <= MAX_ELEMENTS, why)
    }

    fn require(mut self, holds: bool, why: impl FnOnce() -> String) -> Self {
        if !holds && self.wrong.is_none() {
            self.wrong = Some((why(), "choose a value within these bounds"));
        }
        self
    }

    /// Returns the error for the first violation, if there is one.
    pub fn done(self) -> Result<()> {
        match self.wrong {
            None => Ok(()),
            Some((why, remedy)) => Err(Error::config("model", why, remedy)),
        }
    }
}
