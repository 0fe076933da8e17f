//! What is swept: a file's steps, as the product of lists.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use gapless_allocators::Kind;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

use crate::run::{ConfigError, line_of, size, text_of, with_nearest};
use crate::step::{Step, StepSpec};

/// Configurations of one sweep, at most: some hundred megabytes, and seconds before the first is timed.
const MAX_CONFIGURATIONS: usize = 100_000;

/// Menus of one sweep, at most: each has fronts of its own.
const MAX_MENUS: usize = 100;

/// Values of conditions × configurations, at most: each configuration is compared with all of them.
const MAX_COMPARISONS: usize = 1 << 24;

/// A sweep as a file says it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// What all of them have, by the keys of [`StepSpec`].
    #[serde(default)]
    step: Table,
    /// Lists of values of such keys: each configuration has one of each.
    vary: Table,
    /// Combinations that are left out: every key has that value, or one of those.
    #[serde(default)]
    skip: Vec<Table>,
    /// Parts with fronts of their own: a name, and conditions as those of `skip`.
    #[serde(default)]
    menu: Vec<Table>,
    #[serde(default)]
    sweep: SweepOptions,
}

/// How a sweep is done: its `[sweep]`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SweepOptions {
    /// The allocators that tables are replayed through, beside the plan. One that wastes much keeps much on its front: with `bfc`, whose
    /// regions double, most of what fits has to be replayed.
    pub allocators: Vec<String>,
    /// Bytes of each rank's device; the profile's where it is absent. What has more bytes alive is neither planned nor replayed.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "size")]
    pub capacity: Option<u64>,
    /// Which configurations are planned and replayed, of those that can fit.
    pub plan: Planned,
    /// Ranks are replayed that have at least this part of the live bytes of the fullest.
    pub fullest: f64,
}

impl Default for SweepOptions {
    fn default() -> Self {
        let allocators = ["pytorch", "pytorch-expandable", "gmlake", "stalloc"];
        Self { allocators: allocators.map(str::to_owned).to_vec(), capacity: None, plan: Planned::Front, fullest: 0.9 }
    }
}

/// Which configurations are planned and replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Planned {
    /// Those that can be on a Pareto front of bytes and time, among the configurations that share a graph.
    #[default]
    Front,
    /// All that can fit.
    All,
}

/// A checked sweep.
#[derive(Debug, Clone)]
pub struct Sweep {
    /// Its configurations, in order: those that share a graph stand together.
    pub configurations: Vec<Configuration>,
    /// The keys that vary, in order.
    pub varied: Vec<String>,
    /// The allocators beside the plan.
    pub allocators: Vec<Kind>,
    /// The menus to choose a configuration from: `all`, and those that the file names.
    pub menus: Vec<String>,
    /// How it is done.
    pub options: SweepOptions,
    /// The name of the model, if all have the same.
    pub title: String,
}

/// One step of a sweep.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// A digest of all that decides its row.
    pub key: String,
    /// Its values of what varies.
    pub values: Table,
    /// The menus that have it, as indices of [`Sweep::menus`]: 0, and others.
    pub menus: Vec<usize>,
    /// All of it.
    pub spec: StepSpec,
    /// The step, or why there is none.
    pub step: Result<Step, String>,
}

impl Sweep {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`], with line, key and remedy.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = text_of(path)?;
        Self::parse(&text).map_err(|error| match error {
            ConfigError::Syntax { message, .. } => ConfigError::Syntax { path: path.to_owned(), message },
            other => other,
        })
    }

    /// The same of a text.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let syntax = |message| ConfigError::Syntax { path: "sweep".into(), message };
        let file: File = toml::from_str(text).map_err(|error| syntax(with_nearest(error.to_string())))?;
        let here = |error: ConfigError, table: &str| in_table(error, text, table);
        // What is counted comes before what takes time for each of them.
        let lists = lists(&file.vary).map_err(|error| here(error, "vary"))?;
        count_conditions(&file, count(&lists)).map_err(|error| {
            let table = if names(&error, "menu") { "menu" } else { "skip" };
            here(error, table)
        })?;
        let allocators = allocators(&file.sweep).map_err(|error| here(error, "sweep"))?;
        let menus = menus(&file.menu).map_err(|error| here(error, "menu"))?;
        for skip in &file.skip {
            check_condition("skip", skip).map_err(|error| here(error, "skip"))?;
        }
        // Every value by itself, beside the first of each other list.
        let mut base = file.step.clone();
        StepSpec::over(&Table::new(), &base).map_err(|error| here(error, "step"))?;
        base.extend(lists.iter().map(|(key, values)| (key.clone(), values[0].clone())));
        for (key, values) in &lists {
            for value in values {
                let one = Table::from_iter([(key.clone(), value.clone())]);
                let checked = StepSpec::over(&base, &one).and_then(|spec| spec.check());
                checked.map_err(|error| {
                    let table = if names(&error, key) { "vary" } else { "step" };
                    here(error, table)
                })?;
            }
        }
        let configurations = configurations(&file, &lists, &menus).map_err(|error| here(error, "vary"))?;
        if configurations.is_empty() {
            return Err(ConfigError::value("skip", "leaves no configuration", "skip less, or vary more"));
        }
        let varied = lists.into_iter().map(|(key, _)| key).collect();
        let title = title(&configurations);
        let names = menus.into_iter().map(|(name, _)| name);
        let menus = std::iter::once("all".to_owned()).chain(names).collect();
        Ok(Self { configurations, varied, allocators, menus, options: file.sweep, title })
    }
}

/// An error with the table of its key, and the line of that.
fn in_table(error: ConfigError, text: &str, table: &str) -> ConfigError {
    let ConfigError::Value { key, line: None, why, remedy } = error else { return error };
    let key = if key == table { key } else { format!("{table}.{key}") };
    ConfigError::Value { line: line_of(text, &key), key, why, remedy }
}

fn names(error: &ConfigError, key: &str) -> bool {
    matches!(error, ConfigError::Value { key: of, .. } if of == key)
}

/// The lists of what varies.
fn lists(vary: &Table) -> Result<Vec<(String, Vec<Value>)>, ConfigError> {
    let list = |(key, value): (&String, &Value)| {
        let Value::Array(values) = value else {
            return Err(ConfigError::value(key, "is no list", "write, for example, [1, 2, 4]"));
        };
        if values.is_empty() {
            return Err(ConfigError::value(key, "is an empty list", "name a value, or leave the key out"));
        }
        Ok((key.clone(), values.clone()))
    };
    let lists = vary.iter().map(list).collect::<Result<Vec<_>, _>>()?;
    if count(&lists) > MAX_CONFIGURATIONS {
        let why = format!("makes more than {MAX_CONFIGURATIONS} configurations");
        return Err(ConfigError::value("vary", why, "vary less at a time"));
    }
    for (key, values) in &lists {
        let mut known = BTreeSet::new();
        if let Some(twice) = values.iter().map(Value::to_string).find(|value| !known.insert(value.clone())) {
            return Err(ConfigError::value(key, format!("{twice} stands twice"), "name each value once"));
        }
    }
    Ok(lists)
}

/// How many configurations the product of lists has.
fn count(lists: &[(String, Vec<Value>)]) -> usize {
    lists.iter().fold(1, |count, (_, values)| count.saturating_mul(values.len()))
}

/// Refuses more menus and conditions than can be compared with every configuration.
fn count_conditions(file: &File, configurations: usize) -> Result<(), ConfigError> {
    if file.menu.len() > MAX_MENUS {
        let why = format!("{} menus are more than {MAX_MENUS}", file.menu.len());
        return Err(ConfigError::value("menu", why, "name fewer"));
    }
    let values = |value: &Value| value.as_array().map_or(1, Vec::len);
    let of = |table: &Table| 1 + table.iter().map(|(_, value)| values(value)).sum::<usize>();
    let conditions: usize = file.skip.iter().chain(&file.menu).map(of).sum();
    // A condition takes longer to check than to compare.
    if conditions.saturating_mul(configurations.max(1000)) > MAX_COMPARISONS {
        let why = format!("the {conditions} values of skip and menu are too many for {configurations} configurations");
        return Err(ConfigError::value("skip", why, "skip less, or vary less at a time"));
    }
    Ok(())
}

/// Names and conditions of the menus that a file has.
fn menus(tables: &[Table]) -> Result<Vec<(String, Table)>, ConfigError> {
    let mut menus: Vec<(String, Table)> = Vec::new();
    for table in tables {
        let mut condition = table.clone();
        let Some(Value::String(name)) = condition.remove("name") else {
            return Err(ConfigError::value("menu", "has no name", "name it, e.g. name = \"coarse\""));
        };
        if name == "all" || menus.iter().any(|(other, _)| *other == name) {
            return Err(ConfigError::value("name", format!("{name} is another menu's"), "name each menu once"));
        }
        check_condition("menu", &condition)?;
        menus.push((name, condition));
    }
    Ok(menus)
}

/// That a condition of such a table has keys of steps, with values of their types.
fn check_condition(table: &str, condition: &Table) -> Result<(), ConfigError> {
    for (key, value) in condition {
        let one = |value: &Value| StepSpec::over(&Table::new(), &Table::from_iter([(key.clone(), value.clone())]));
        match value {
            // A list of a key that is one by itself, or of values.
            Value::Array(values) if one(value).is_err() => values.iter().try_for_each(|value| one(value).map(drop)),
            value => one(value).map(drop),
        }?;
    }
    match condition.is_empty() {
        true => Err(ConfigError::value(table, "has no key", "say of which steps, e.g. schedule = \"gpipe\"")),
        false => Ok(()),
    }
}

fn allocators(options: &SweepOptions) -> Result<Vec<Kind>, ConfigError> {
    if !(0.0..=1.0).contains(&options.fullest) {
        return Err(ConfigError::value("fullest", format!("{} is no part", options.fullest), "it is between 0 and 1"));
    }
    let kind = |name: &String| -> Result<Kind, ConfigError> {
        let kind: Kind = name.parse().map_err(|why| ConfigError::value("allocators", why, "name some of them"))?;
        match kind {
            Kind::Gapless | Kind::Ideal => Err(ConfigError::value(
                "allocators",
                format!("{name} is in every row"),
                "leave it out: live_bytes and arena_bytes",
            )),
            other => Ok(other),
        }
    };
    options.allocators.iter().map(kind).collect()
}

/// The product of the lists over what all have, without what is skipped; those of one graph one after another.
fn configurations(
    file: &File,
    lists: &[(String, Vec<Value>)],
    menus: &[(String, Table)],
) -> Result<Vec<Configuration>, ConfigError> {
    let mut all = Vec::new();
    for number in 0..count(lists) {
        let mut values = Table::new();
        let mut rest = number;
        for (key, list) in lists.iter().rev() {
            values.insert(key.clone(), list[rest % list.len()].clone());
            rest /= list.len();
        }
        let spec = StepSpec::over(&file.step, &values)?;
        let table = Table::try_from(&spec).expect("keys and plain values are TOML");
        let is_met = |condition: &Table| condition.iter().all(|(key, value)| has(&table, key, value));
        if !file.skip.iter().any(is_met) {
            let step = spec.check().map_err(|error| error.to_string());
            let key = digest(&table, &step, file);
            let of = (1..).zip(menus).filter(|(_, (_, condition))| is_met(condition)).map(|(index, _)| index);
            let menus = std::iter::once(0).chain(of).collect();
            all.push(Configuration { key, values, menus, step, spec });
        }
    }
    // Stable: what shares a graph keeps its order, and stands where the first of it does.
    let mut first = HashMap::new();
    let graph = |of: &Configuration| of.step.as_ref().map_or_else(Clone::clone, Step::graph_key);
    let order: Vec<usize> = all
        .iter()
        .enumerate()
        .map(|(index, configuration)| *first.entry(graph(configuration)).or_insert(index))
        .collect();
    let mut ordered: Vec<(usize, Configuration)> = order.into_iter().zip(all).collect();
    ordered.sort_by_key(|(order, _)| *order);
    Ok(ordered.into_iter().map(|(_, configuration)| configuration).collect())
}

/// Whether a step has this value of a key, or one of these.
fn has(table: &Table, key: &str, value: &Value) -> bool {
    let here = table.get(key);
    match value {
        Value::Array(values) => here == Some(value) || here.is_some_and(|here| values.contains(here)),
        value => here == Some(value),
    }
}

/// Of all that decides a row, what files of models and devices say among it. What is measured here is another number each time.
fn digest(keys: &Table, step: &Result<Step, String>, file: &File) -> String {
    let read = match step {
        Ok(step) => format!("{} {:?}", step.graph_key(), (!step.device.is_measured()).then_some(&step.device)),
        Err(why) => why.clone(),
    };
    let options = Table::try_from(&file.sweep).expect("keys and plain values are TOML");
    let menus: Vec<String> = file.menu.iter().map(Table::to_string).collect();
    let text = format!("{}\n{keys}\n{read}\n{options}\n{}", env!("CARGO_PKG_VERSION"), menus.join("\n"));
    blake3::hash(text.as_bytes()).to_hex()[..16].to_owned()
}

fn title(configurations: &[Configuration]) -> String {
    let mut titles: Vec<&str> = configurations.iter().filter_map(|of| of.step.as_ref().ok()).map(Step::title).collect();
    titles.dedup();
    match titles[..] {
        [one] => one.to_owned(),
        _ => "several models".to_owned(),
    }
}
