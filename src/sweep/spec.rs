//! The sweep file. It has the keys of a run, and lists of values. Every combination of these values is a configuration
//! of the sweep.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use gapless_allocators::Kind;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::run::{
    ConfigError, RunConfig, assign, flatten, key_of, line_of, move_former_names, set, text_of, value_at, with_nearest,
};
use crate::step::{ExpertLoad, Lowering, Step};

/// Maximum number of configurations in one sweep. At this maximum, a sweep takes some hundred megabytes, and some
/// seconds before it times the first configuration.
const MAX_CONFIGURATIONS: usize = 100_000;

/// Maximum number of menus in one sweep. Each menu has its own Pareto fronts.
const MAX_MENUS: usize = 100;

/// Maximum of (values in conditions) × (configurations), because each configuration is compared with every value.
const MAX_COMPARISONS: usize = 1 << 24;

/// The tables that only a sweep file has. All other keys of a sweep file are keys of a run, and apply to all
/// configurations.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Lists of values of a run's keys. Each configuration has one value of each list.
    vary: Table,
    /// Combinations of values that are skipped. A configuration is skipped if it matches every key of one of these
    /// tables. A key matches if the configuration's value is the given value, or is an element of the given list.
    #[serde(default)]
    skip: Vec<Table>,
    /// Subsets of the configurations that have their own Pareto fronts. Each table has a name, and conditions like
    /// those of `skip`.
    #[serde(default)]
    menu: Vec<Table>,
    #[serde(default)]
    sweep: SweepOptions,
}

/// The names of the tables in [`File`].
const TABLES: [&str; 4] = ["vary", "skip", "menu", "sweep"];

/// Settings of a sweep: its table `[sweep]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SweepOptions {
    /// Allocators through which each step is replayed, in addition to the plan. The more an allocator wastes, the more
    /// configurations must be replayed for its Pareto front. For `bfc`, whose regions double in size, these are most
    /// configurations that fit.
    pub allocators: Vec<String>,
    /// Bytes of each rank's device. The default is the memory of the device profile. Configurations with more live
    /// bytes are neither planned nor replayed.
    #[serde(skip_serializing_if = "Option::is_none", with = "gapless_engine::compile::step::text::size")]
    pub capacity: Option<u64>,
    /// Selects the configurations that are planned and replayed, among those that can fit the device.
    pub plan: PlannedConfigurations,
    /// The number of ranks of each configuration. Combinations whose mesh has another number are left out. If the file sets
    /// and varies no `mesh.data`, the data ranks are the rest, and combinations whose other axes do not divide the number
    /// are left out.
    #[serde(skip_serializing)]
    pub ranks: Option<usize>,
    /// A rank is only replayed if its live bytes are at least this fraction of the fullest rank's live bytes.
    pub fullest: f64,
}

impl Default for SweepOptions {
    fn default() -> Self {
        let allocators = ["pytorch", "pytorch-expandable", "gmlake", "stalloc"];
        Self {
            allocators: allocators.map(str::to_owned).to_vec(),
            capacity: None,
            plan: PlannedConfigurations::Front,
            ranks: None,
            fullest: 0.9,
        }
    }
}

/// The configurations that are planned and replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PlannedConfigurations {
    /// Configurations that can be on a Pareto front of bytes and time, among those that share a graph.
    #[default]
    Front,
    /// All configurations that can fit.
    All,
}

/// A sweep whose file was checked.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// The configurations. Configurations with the same graph are adjacent.
    pub configurations: Vec<Configuration>,
    /// The keys that vary, in the order of the file's lists.
    pub varied: Vec<String>,
    /// The allocators through which steps are replayed, in addition to the plan.
    pub allocators: Vec<Kind>,
    /// Names of the menus: `all`, then those of the file.
    pub menus: Vec<String>,
    /// Settings of the sweep.
    pub options: SweepOptions,
    /// Name of the model if all configurations have the same model.
    pub title: String,
    /// Messages about keys that have moved.
    pub notices: Vec<String>,
}

/// One combination of values.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// Digest of all inputs that determine the configuration's row.
    pub key: String,
    /// The configuration's values of the keys that vary.
    pub values: Table,
    /// Indices in [`Sweep::menus`] of the menus that contain the configuration. Index 0, the menu `all`, is always
    /// included.
    pub menus: Vec<usize>,
    /// All keys and values of the configuration's run, as in the file.
    pub keys: Vec<(String, Value)>,
    /// The step, or the reason why there is no such step.
    pub step: Result<Step, String>,
}

impl Configuration {
    /// Returns a key for the graph of the step, or `None` if there is no such step.
    pub(super) fn graph_key(&self) -> Option<String> {
        self.step.as_ref().ok().map(Step::graph_key)
    }
}

impl Sweep {
    /// Reads and checks a sweep file. Assignments such as `estimate.expert_load=worst` set keys that all configurations
    /// have, after the file was read.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if the file cannot be read, or if the file or an assignment has an invalid setting. The
    /// error of a setting has the line, the key and a remedy.
    pub fn read(path: &Path, assignments: &[String]) -> Result<Self, ConfigError> {
        let text = text_of(path)?;
        Self::assigned(&text, assignments).map_err(|error| match error {
            ConfigError::Syntax { message, .. } => ConfigError::Syntax { path: path.to_owned(), message },
            other => other,
        })
    }

    /// Parses and checks the text of a sweep file.
    ///
    /// # Errors
    /// Returns a [`ConfigError`] if the text has an invalid setting.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        Self::assigned(text, &[])
    }

    /// True if the allocators replay the step of an eager framework in some configurations. Plans are always for
    /// gapless's own step.
    pub fn replays_eager(&self) -> bool {
        let steps = self.configurations.iter().filter_map(|configuration| configuration.step.as_ref().ok());
        !self.allocators.is_empty() && steps.into_iter().any(|step| step.lowering != Lowering::Gapless)
    }

    fn assigned(text: &str, assignments: &[String]) -> Result<Self, ConfigError> {
        let syntax = |message| ConfigError::Syntax { path: "sweep".into(), message };
        let mut base: Table = toml::from_str(text).map_err(|error| syntax(with_nearest(error.to_string())))?;
        assign(&mut base, assignments)?;
        let tables =
            TABLES.into_iter().filter_map(|name| Some((name.to_owned(), base.remove(name)?))).collect::<Table>();
        if !tables.contains_key("vary") {
            return Err(ConfigError::value(
                "vary",
                "is missing",
                "write lists of values, for example [vary] batch = [4, 8]",
            ));
        }
        let file = File::deserialize(tables).map_err(|error| syntax(with_nearest(error.to_string())))?;
        let here = |error: ConfigError, table: &str| in_table(error, text, table);
        // The numbers of values are checked first, because all later checks take time for each value.
        let lists = lists(&file.vary).map_err(|error| here(error, "vary"))?;
        let is_assigned = |name: &str| {
            let mut keys = assignments.iter().filter_map(|text| text.split('=').next());
            keys.any(|key| key_of(key.trim()) == key_of(name))
        };
        if let Some((name, _)) = lists.iter().find(|(name, _)| is_assigned(name)) {
            let why = "has a list in the file, so that setting it has no effect";
            return Err(here(ConfigError::value(name, why, "leave out the assignment, or the list"), "vary"));
        }
        count_conditions(&file, count(&lists)).map_err(|error| {
            let table = if concerns_key(&error, "menu") { "menu" } else { "skip" };
            here(error, table)
        })?;
        let allocators = allocators(&file.sweep).map_err(|error| here(error, "sweep"))?;
        let menus = menus(&file.menu).map_err(|error| here(error, "menu"))?;
        for skip in &file.skip {
            check_condition("skip", skip).map_err(|error| here(error, "skip"))?;
        }
        // Each value is checked once, in the configuration that has the first value of every other list.
        let mut first = base.clone();
        for (name, values) in &lists {
            put(&mut first, name, &values[0]).map_err(|error| here(error, "vary"))?;
        }
        let mut notices = Vec::new();
        for (name, values) in &lists {
            for value in values {
                let mut one = first.clone();
                put(&mut one, name, value)?;
                let checked = RunConfig::of_table(&one).and_then(|run| Step::new(&run).map(|_| run.notices));
                notices = checked.map_err(|error| {
                    match lists.iter().find(|(name, _)| concerns_key(&error, key_of(name))) {
                        Some((name, _)) => here(with_key(error, name), "vary"),
                        None => here(error, ""),
                    }
                })?;
            }
        }
        let configurations = configurations(&base, &file, &lists, &menus).map_err(|error| here(error, "vary"))?;
        if configurations.is_empty() {
            let (key, why) = match file.sweep.ranks {
                Some(ranks) => ("sweep.ranks", format!("leaves no configuration: no mesh has {ranks} ranks")),
                None => ("skip", "leaves no configuration".to_owned()),
            };
            return Err(ConfigError::value(key, why, "skip less, or vary more"));
        }
        let is_derived = configurations.iter().any(|configuration| configuration.values.contains_key(DATA_RANKS))
            && !lists.iter().any(|(name, _)| key_of(name) == DATA);
        let derived = is_derived.then(|| DATA_RANKS.to_owned());
        let varied = lists.into_iter().map(|(key, _)| key).chain(derived).collect();
        let title = title(&configurations);
        let names = menus.into_iter().map(|(name, _)| name);
        let menus = std::iter::once("all".to_owned()).chain(names).collect();
        Ok(Self { configurations, varied, allocators, menus, options: file.sweep, title, notices })
    }
}

impl Sweep {
    /// Returns a digest of the keys of all rows.
    pub fn digest(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        for configuration in &self.configurations {
            hasher.update(configuration.key.as_bytes());
        }
        hasher.finalize().to_hex()[..16].to_owned()
    }
}

/// Prefixes the key of an error with its table, and finds its line.
fn in_table(error: ConfigError, text: &str, table: &str) -> ConfigError {
    let ConfigError::Value { key, line: None, why, remedy } = error else { return error };
    let key = if key == table || table.is_empty() { key } else { format!("{table}.{key}") };
    ConfigError::Value { line: line_of(text, &key), key, why, remedy }
}

fn concerns_key(error: &ConfigError, key: &str) -> bool {
    matches!(error, ConfigError::Value { key: named, .. } if named == key)
}

/// Sets a key of a run by its long or short name.
fn put(root: &mut Table, name: &str, value: &Value) -> Result<(), ConfigError> {
    set(root, key_of(name), value.clone()).map_err(|why| ConfigError::value(name, why, "name a key of a run"))
}

/// Replaces the key of an error.
fn with_key(error: ConfigError, name: &str) -> ConfigError {
    match error {
        ConfigError::Value { line, why, remedy, .. } => ConfigError::Value { key: name.to_owned(), line, why, remedy },
        other => other,
    }
}

/// Reads and checks the lists of `[vary]`.
fn lists(vary: &Table) -> Result<Vec<(String, Vec<Value>)>, ConfigError> {
    let list = |(key, value): (String, Value)| {
        let key = &key;
        let Value::Array(values) = value else {
            return Err(ConfigError::value(key, "is not a list", "write, for example, [1, 2, 4]"));
        };
        if values.is_empty() {
            return Err(ConfigError::value(key, "is an empty list", "name a value, or leave the key out"));
        }
        Ok((key.clone(), values.clone()))
    };
    let lists = flatten(vary, "").into_iter().map(list).collect::<Result<Vec<_>, _>>()?;
    let mut known = BTreeSet::new();
    if let Some((name, _)) = lists.iter().find(|(name, _)| !known.insert(key_of(name))) {
        let why = format!("is {}, which another list varies", key_of(name));
        return Err(ConfigError::value(name, why, "vary each key once"));
    }
    if count(&lists) > MAX_CONFIGURATIONS {
        let why = format!("makes more than {MAX_CONFIGURATIONS} configurations");
        return Err(ConfigError::value("vary", why, "vary fewer values at a time"));
    }
    for (key, values) in &lists {
        let mut known = BTreeSet::new();
        if let Some(twice) = values.iter().map(Value::to_string).find(|value| !known.insert(value.clone())) {
            return Err(ConfigError::value(key, format!("{twice} appears twice"), "name each value once"));
        }
    }
    Ok(lists)
}

/// The number of configurations in the product of the lists.
fn count(lists: &[(String, Vec<Value>)]) -> usize {
    lists.iter().fold(1, |count, (_, values)| count.saturating_mul(values.len()))
}

/// Returns an error if the file has more menus or conditions than can be compared with every configuration.
fn count_conditions(file: &File, configurations: usize) -> Result<(), ConfigError> {
    if file.menu.len() > MAX_MENUS {
        let why = format!("{} menus are more than the maximum of {MAX_MENUS}", file.menu.len());
        return Err(ConfigError::value("menu", why, "use fewer"));
    }
    let values = |value: &Value| value.as_array().map_or(1, Vec::len);
    let conditions_of = |table: &Table| 1 + table.iter().map(|(_, value)| values(value)).sum::<usize>();
    let conditions: usize = file.skip.iter().chain(&file.menu).map(conditions_of).sum();
    // Checking a condition takes longer than comparing with it, so few configurations count as 1000.
    if conditions.saturating_mul(configurations.max(1000)) > MAX_COMPARISONS {
        let why = format!("the {conditions} values of skip and menu are too many for {configurations} configurations");
        return Err(ConfigError::value("skip", why, "skip less, or vary fewer values at a time"));
    }
    Ok(())
}

/// Reads the menus of the file, and returns the name and the condition of each.
fn menus(tables: &[Table]) -> Result<Vec<(String, Table)>, ConfigError> {
    let mut menus: Vec<(String, Table)> = Vec::new();
    for table in tables {
        let mut condition = table.clone();
        let Some(Value::String(name)) = condition.remove("name") else {
            return Err(ConfigError::value("menu", "has no name", "name it, e.g. name = \"coarse\""));
        };
        if name == "all" || menus.iter().any(|(other, _)| *other == name) {
            return Err(ConfigError::value(
                "name",
                format!("{name} is the name of another menu"),
                "name each menu once",
            ));
        }
        check_condition("menu", &condition)?;
        menus.push((name, condition));
    }
    Ok(menus)
}

/// Checks that a condition has at least one key, and that its keys and values are those of a run.
fn check_condition(table: &str, condition: &Table) -> Result<(), ConfigError> {
    for (key, value) in &flatten(condition, "") {
        let one = |value: &Value| {
            let mut root = Table::from_iter([("model".to_owned(), Value::from("small"))]);
            put(&mut root, key, value)?;
            RunConfig::of_table(&root).map_err(|error| with_key(error, key))
        };
        match value {
            // The array is either a single value, of a key that takes a list, or a list of possible values.
            Value::Array(values) if one(value).is_err() => values.iter().try_for_each(|value| one(value).map(drop)),
            value => one(value).map(drop),
        }?;
    }
    match condition.is_empty() {
        true => Err(ConfigError::value(table, "has no key", "add a condition, for example schedule = \"gpipe\"")),
        false => Ok(()),
    }
}

fn allocators(options: &SweepOptions) -> Result<Vec<Kind>, ConfigError> {
    if !(0.0..=1.0).contains(&options.fullest) {
        return Err(ConfigError::value("fullest", format!("is {}", options.fullest), "set it from 0 to 1"));
    }
    let kind = |name: &String| -> Result<Kind, ConfigError> {
        let kind: Kind = name.parse().map_err(|why| ConfigError::value("allocators", why, "correct it"))?;
        match [Kind::GAPLESS, Kind::IDEAL].contains(&kind) {
            true => Err(ConfigError::value(
                "allocators",
                format!("{name} is in every row"),
                "leave it out: its figures are in live_bytes and arena_bytes",
            )),
            false => Ok(kind),
        }
    };
    options.allocators.iter().map(kind).collect()
}

/// Returns a configuration for each combination of the lists' values, together with the shared keys. Skipped
/// combinations are dropped. Configurations with the same graph become adjacent.
fn configurations(
    base: &Table,
    file: &File,
    lists: &[(String, Vec<Value>)],
    menus: &[(String, Table)],
) -> Result<Vec<Configuration>, ConfigError> {
    let mut base = base.clone();
    move_former_names(&mut base)?;
    let mut all = Vec::new();
    for number in 0..count(lists) {
        let mut values = Table::new();
        let mut rest = number;
        for (key, list) in lists.iter().rev() {
            values.insert(key.clone(), list[rest % list.len()].clone());
            rest /= list.len();
        }
        let mut root = base.clone();
        values.iter().try_for_each(|(name, value)| put(&mut root, name, value))?;
        if let Some(ranks) = file.sweep.ranks {
            let Some(data) = data_ranks(&root, ranks) else { continue };
            if value_at(&root, DATA).is_none() {
                put(&mut root, DATA, &data)?;
                values.insert(DATA_RANKS.to_owned(), data);
            }
        }
        let keys = flatten(&root, "");
        let run = RunConfig::of_table(&root)?;
        let resolved = Table::try_from(&run).expect("keys and plain values are TOML");
        let has = |(name, value): &(String, Value)| {
            let key = key_of(name);
            [&root, &resolved].into_iter().any(|table| is_one_of(value_at(table, key), value))
        };
        let is_met = |condition: &Table| flatten(condition, "").iter().all(has);
        if !file.skip.iter().any(is_met) {
            let step = Step::new(&run).map_err(|error| error.to_string());
            let key = digest(&resolved, &step, file);
            let met = (1..).zip(menus).filter(|(_, (_, condition))| is_met(condition)).map(|(index, _)| index);
            let menus = std::iter::once(0).chain(met).collect();
            all.push(Configuration { key, values, menus, keys, step });
        }
    }
    // This stable sort moves configurations with the same graph to the first of them, and keeps their order.
    let mut first = HashMap::new();
    let graph = |configuration: &Configuration| configuration.step.as_ref().map_or_else(Clone::clone, Step::graph_key);
    let order: Vec<usize> = all
        .iter()
        .enumerate()
        .map(|(index, configuration)| *first.entry(graph(configuration)).or_insert(index))
        .collect();
    let mut ordered: Vec<(usize, Configuration)> = order.into_iter().zip(all).collect();
    ordered.sort_by_key(|(order, _)| *order);
    Ok(ordered.into_iter().map(|(_, configuration)| configuration).collect())
}

/// The key of data ranks.
const DATA: &str = "mesh.data";
/// Its short name.
const DATA_RANKS: &str = "data_ranks";

/// Returns the data ranks of a mesh of `ranks` ranks: those of the run if it sets them, otherwise as many as its other axes
/// leave. Returns `None` if there is no such mesh.
fn data_ranks(root: &Table, ranks: usize) -> Option<Value> {
    let extent = |axis: &str| match value_at(root, &format!("mesh.{axis}")) {
        Some(value) => value.as_integer().and_then(|extent| usize::try_from(extent).ok()),
        None => Some(1),
    };
    let others = ["pipeline", "shard", "expert", "context", "tensor"]
        .into_iter()
        .try_fold(1usize, |product, axis| product.checked_mul(extent(axis)?).filter(|&product| product > 0))?;
    let data = Some(ranks / others).filter(|_| ranks.is_multiple_of(others))?;
    let is_this = value_at(root, DATA).is_none() || extent("data") == Some(data);
    is_this.then_some(Value::Integer(data as i64))
}

/// True if `here` equals `value` or, if `value` is a list, one of the elements of `value`.
fn is_one_of(here: Option<&Value>, value: &Value) -> bool {
    here == Some(value) || value.as_array().is_some_and(|values| here.is_some_and(|here| values.contains(here)))
}

/// Returns a digest of all inputs that determine a row, including the contents of model and device files, and of
/// recorded loads. The digest
/// leaves out a device that is measured, because its measurements differ each time.
fn digest(keys: &Table, step: &Result<Step, String>, file: &File) -> String {
    let read = match step {
        Ok(step) => {
            let device = (!step.device.is_measured()).then_some(&step.device);
            let recorded = matches!(step.expert_load, ExpertLoad::Recorded(_)).then_some(&step.expert_load);
            format!("{} {device:?}{}", step.digest(), recorded.map_or_else(String::new, |load| format!(" {load:?}")))
        }
        Err(why) => why.clone(),
    };
    let options = Table::try_from(&file.sweep).expect("keys and plain values are TOML");
    let menus: Vec<String> = file.menu.iter().map(Table::to_string).collect();
    let text = format!("{}\n{keys}\n{read}\n{options}\n{}", env!("CARGO_PKG_VERSION"), menus.join("\n"));
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

fn title(configurations: &[Configuration]) -> String {
    let mut titles: Vec<&str> =
        configurations.iter().filter_map(|configuration| configuration.step.as_ref().ok()).map(Step::title).collect();
    titles.dedup();
    match titles[..] {
        [one] => one.to_owned(),
        _ => "several models".to_owned(),
    }
}
