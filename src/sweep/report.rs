//! placeholder
use super::{Row, Sweep};
pub(super) fn page(_sweep: &Sweep, _rows: &[Row]) -> String {
    String::new()
}
