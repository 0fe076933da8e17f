//! The origin of a result: the software and the step that it is for. Every file and JSON object that the commands write
//! about a step names it.

use serde::{Deserialize, Serialize};

use super::Step;

/// The software that computed a result, and the step that the result is for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Origin {
    /// The version of gapless.
    #[serde(default)]
    pub version: String,
    /// The commit of gapless, which ends with `-dirty` if files were changed after it; `None` if gapless was not built in
    /// a git checkout.
    #[serde(default)]
    pub commit: Option<String>,
    /// The digest of the step ([`Step::digest`]); `None` for a result that is not about a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

impl Origin {
    /// Returns the origin of a result of this build.
    pub fn new(step: Option<&Step>) -> Self {
        let commit = option_env!("GAPLESS_COMMIT").filter(|commit| !commit.is_empty());
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: commit.map(str::to_owned),
            step: step.map(Step::digest),
        }
    }
}

impl Step {
    /// Returns a digest of everything that determines the programs of the step: the model, the options, the kernels and
    /// the lowering. The device for which time is estimated and the folder of the offload file are left out.
    pub fn digest(&self) -> String {
        let mut options = self.options.clone();
        options.memory.offload_to = None;
        // A schedule of one's own is given by its order, because its name says nothing.
        let schedule = &self.options.pipeline.schedule;
        let is_known = gapless_parallel::all().iter().any(|known| known.name() == schedule.name());
        let order = (!is_known).then(|| {
            let table = schedule.table(&self.shape());
            table.map_or_else(|error| error.to_string(), |table| gapless_parallel::write_table(&table))
        });
        let text = format!("{:?} {options:?} {:?} {:?} {order:?}", self.architecture(), self.target(), self.lowering);
        blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::RunConfig;

    #[test]
    fn a_digest_is_of_the_step_alone() {
        let digest = |keys: &str| {
            let text = format!("model = 'small'\n{keys}");
            Step::new(&RunConfig::parse(&text, &[]).unwrap()).unwrap().digest()
        };
        let plain = digest("");
        for same in ["estimate.profile = 'h200'", "memory.offload_to = '/tmp'", "steps = 7"] {
            assert_eq!(digest(same), plain, "{same}");
        }
        for other in
            ["step.sequence = 32", "pipeline.schedule = 'gpipe'", "device = 'cuda'", "memory.recompute = 'layers'"]
        {
            assert_ne!(digest(other), plain, "{other}");
        }
    }
}
