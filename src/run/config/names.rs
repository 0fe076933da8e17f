//! Short names of keys, for the flags of commands and the lists of a sweep. In former versions, these keys were in the
//! table `[step]`, where they are still accepted.

use toml::{Table, Value};

use super::{ConfigError, ModelConfig};

/// Short names and their keys. A flag of the command is a short name with dashes: `--micro-batches 4` means
/// `--set step.micro_batches=4`.
pub const NAMES: [(&str, &str); 38] = [
    ("model", "model"),
    ("batch", "step.batch"),
    ("micro_batches", "step.micro_batches"),
    ("sequence", "step.sequence"),
    ("precision", "step.precision"),
    ("optimizer", "optimizer.name"),
    ("data_ranks", "mesh.data"),
    ("pipeline_ranks", "mesh.pipeline"),
    ("shard_ranks", "mesh.shard"),
    ("expert_ranks", "mesh.expert"),
    ("tensor_ranks", "mesh.tensor"),
    ("context_ranks", "mesh.context"),
    ("fold", "mesh.fold"),
    ("zero_stage", "step.zero_stage"),
    ("prefetch", "step.prefetch"),
    ("reductions", "step.reductions"),
    ("sequence_parallel", "step.sequence_parallel"),
    ("schedule", "pipeline.schedule"),
    ("chunks", "pipeline.chunks"),
    ("cut", "pipeline.cut"),
    ("recompute", "memory.recompute"),
    ("budget", "memory.budget"),
    ("compress", "memory.compress"),
    ("offload", "memory.offload"),
    ("routing", "memory.routing"),
    ("overflow", "memory.overflow"),
    ("planning", "memory.planning"),
    ("lora", "trainable.lora.rank"),
    ("lora_targets", "trainable.lora.targets"),
    ("train", "trainable.only"),
    ("device", "device"),
    ("threads", "threads"),
    ("lowering", "estimate.lowering"),
    ("expert_load", "estimate.expert_load"),
    ("profile", "estimate.profile"),
    ("tflops", "estimate.tflops"),
    ("terabytes", "estimate.terabytes"),
    ("rank", "estimate.rank"),
];

/// Pairs of a former short name and the present one.
const FORMER_NAMES: [(&str, &str); 2] = [("dtype", "precision"), ("kernels", "device")];

/// Returns the full key for a name. The name may be a short name, a former name (with or without `step.`), or the full
/// key itself.
pub(crate) fn key_of(name: &str) -> &str {
    let bare = name.strip_prefix("step.").unwrap_or(name);
    let short = FORMER_NAMES.iter().find(|(old, _)| *old == bare).map_or(bare, |(_, short)| short);
    NAMES.iter().find(|(known, _)| *known == short).map_or(name, |(_, key)| key)
}

/// Moves keys with former names out of `[step]` to their present places, and returns a notice for each of them.
pub(crate) fn move_former_names(root: &mut Table) -> Result<Vec<String>, ConfigError> {
    let Some(Value::Table(step)) = root.get_mut("step") else { return Ok(Vec::new()) };
    let names: Vec<String> = step.keys().map(|name| format!("step.{name}")).collect();
    let moved = names.into_iter().filter(|name| key_of(name) != name);
    let moved: Vec<(String, Value)> =
        moved.filter_map(|name| step.remove(&name["step.".len()..]).map(|value| (name, value))).collect();
    let mut notices = Vec::new();
    for (old, value) in moved {
        let key = key_of(&old);
        if value_at(root, key).is_some() {
            let why = format!("is given along with {key}, which is its new name");
            return Err(ConfigError::value(&old, why, "leave one of them out"));
        }
        set(root, key, value).map_err(|why| ConfigError::value(key, why, "make it a table"))?;
        notices.push(format!("{old} is now called {key}; the old name will be removed in the next release"));
    }
    Ok(notices)
}

/// Returns the value of a full key such as `step.batch`, or `None` if the table does not contain the key.
pub(crate) fn value_at<'a>(root: &'a Table, key: &str) -> Option<&'a Value> {
    let mut parts = key.split('.');
    let first = root.get(parts.next()?)?;
    parts.try_fold(first, |value, part| value.get(part))
}

/// Assigns a value to a key. Missing tables are created.
pub(crate) fn set(root: &mut Table, key: &str, value: Value) -> Result<(), String> {
    let (tables, last) = key.rsplit_once('.').map_or((None, key), |(tables, last)| (Some(tables), last));
    // These keys are enums, so their table holds only one variant. An assignment to another variant replaces this
    // table. The name of a preset is first expanded to a table.
    if let Some((which @ ("model" | "trainable"), below)) = key.split_once('.') {
        let kept = match root.get(which) {
            Some(Value::String(name)) if which == "model" => {
                Table::try_from(ModelConfig::named(name)?).map_err(|error| error.to_string())?
            }
            Some(Value::Table(table)) => table.clone(),
            _ => Table::new(),
        };
        let variant = below.split('.').next().unwrap_or_default();
        let kept: Table = kept.into_iter().filter(|(name, _)| name == variant).collect();
        root.insert(which.to_owned(), Value::Table(kept));
    }
    // The length of a run is given by one of these keys.
    match key {
        "steps" => drop(root.remove("epochs")),
        "epochs" => drop(root.remove("steps")),
        _ => {}
    }
    let mut table = root;
    for part in tables.into_iter().flat_map(|tables| tables.split('.')) {
        let below = table.entry(part).or_insert_with(|| Value::Table(Table::new()));
        table = below.as_table_mut().ok_or_else(|| format!("{part} is not a table"))?;
    }
    table.insert(last.to_owned(), value);
    Ok(())
}

/// Returns all values in a table and in the tables inside it, each with its full key, such as `step.batch`.
pub(crate) fn flatten(table: &Table, path: &str) -> Vec<(String, Value)> {
    let inner = |(key, value): (&String, &Value)| {
        let key = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match value {
            Value::Table(table) => flatten(table, &key),
            value => vec![(key, value.clone())],
        }
    };
    table.iter().flat_map(inner).collect()
}
