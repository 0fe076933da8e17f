//! A sweep over components of your own. The other files have registered them, so that the sweep knows them by name.

use std::ops::ControlFlow;

use anyhow::{Context, Result};
use gapless::sweep::{Sweep, fragmentation, run as sweep};

const LISTS: &str = r#"
    [vary]
    schedule = ["1f1b", "eager-1f1b"]
    recompute = ["none", "layers", "large-and-cheap"]
    [sweep]
    allocators = ["pytorch", "powers-of-two"]
    plan = "all"
"#;

/// Plans and times all combinations of the schedules and policies, and replays them through both allocators.
pub fn run() -> Result<()> {
    let spec = Sweep::parse(&(super::STEP.to_owned() + LISTS))?;
    let folder = std::env::temp_dir().join(format!("gapless-own-{}", std::process::id()));
    let results = sweep(&spec, &folder, 1, |_| ControlFlow::Continue(()))?.context("nothing stops this sweep")?;
    for row in &results.rows {
        let figures = row.figures.as_ref().with_context(|| format!("{:?}", row.why))?;
        let arena = figures.arena().context("every row is planned")?;
        let values: Vec<String> = row.configuration.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        println!("{}: {arena} bytes, {} ns, {:?}", values.join(", "), figures.nanoseconds, figures.reserved);
    }
    for waste in fragmentation(&spec, &results.rows) {
        println!("{}: {:.1} % wasted, plans {:.1} %", waste.allocator, 100.0 * waste.mean, 100.0 * waste.planned);
    }
    Ok(std::fs::remove_dir_all(folder)?)
}
