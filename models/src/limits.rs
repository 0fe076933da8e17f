//! The extents that a model may have: beyond them nobody trains, and sizes that follow from them could not be counted.

use gapless_engine::{Error, Result};

/// Blocks, at most.
pub const MOST_LAYERS: usize = 4096;
/// Heads, experts and widths, at most.
pub const MOST_WIDTH: usize = 1 << 20;
/// Widths of a feed-forward part, at most.
pub const MOST_HIDDEN: usize = 1 << 22;
/// Tokens of a vocabulary, and positions, at most.
pub const MOST_TOKENS: usize = 1 << 28;
/// Elements of all parameters, at most: 2⁴⁸ take a petabyte.
pub const MOST_ELEMENTS: u128 = 1 << 48;

/// A configuration that is checked before anything is made of it.
#[derive(Default)]
pub(crate) struct Checked {
    wrong: Option<(String, &'static str)>,
}

impl Checked {
    /// An extent between 1 and `most`.
    pub fn extent(self, name: &str, extent: usize, most: usize) -> Self {
        self.holds((1..=most).contains(&extent), || format!("{name} is {extent}, which is not from 1 to {most}"))
    }

    /// A number above 0 whose reciprocal is one as well, in f32.
    pub fn positive(self, name: &str, x: f64) -> Self {
        let is_sound = x > 0.0 && (x as f32).is_normal() && ((1.0 / x) as f32).is_normal();
        self.holds(is_sound, || format!("{name} is {x}, which is not a number above 0 in f32"))
    }

    /// A probability below 1.
    pub fn probability(self, name: &str, x: f64) -> Self {
        self.holds((0.0..1.0).contains(&x), || format!("{name} is {x}, which is not from 0 to below 1"))
    }

    /// The number of all parameters.
    pub fn elements(self, elements: u128) -> Self {
        let why = || format!("it has {elements} parameters, above the maximum of {MOST_ELEMENTS}");
        self.holds(elements <= MOST_ELEMENTS, why)
    }

    fn holds(mut self, holds: bool, why: impl FnOnce() -> String) -> Self {
        if !holds && self.wrong.is_none() {
            self.wrong = Some((why(), "choose a value within these bounds"));
        }
        self
    }

    /// The first thing that is wrong.
    pub fn done(self) -> Result<()> {
        match self.wrong {
            None => Ok(()),
            Some((why, remedy)) => Err(Error::config("model", why, remedy)),
        }
    }
}
