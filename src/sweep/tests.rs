use std::collections::HashSet;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use gapless_alloc::lower_bound;
use gapless_allocators::Kind;
use gapless_engine::Spec;
use gapless_engine::compile::{Executable, table};
use gapless_engine::graph::Node;
use gapless_models::{Gpt, GptConfig};
use gapless_parallel::{Action, OneForwardOneBackward, Schedule, Shape, by_name, register, write_table};

use super::row::Figures;
use super::{
    Status, Sweep, Throughput, above_bound, fragmentation, gains, of_other_commits, run, throughput, unused_reserve,
};
use crate::run::RunConfig;
use crate::step::{CostModel, Step};
use crate::{Recompute, RecomputePolicy};

const TINY: &str = r#"
[step]
model = "gpt:vocabulary=64,layers=4,heads=2,width=32"
batch = 8
sequence = 16
pipeline_ranks = 2
[vary]
schedule = ["1f1b", "gpipe", "zbv"]
micro_batches = [1, 2, 3, 4]
recompute = ["none", "layers"]
"#;

const RECOMPUTE: &str = r#"["none", "layers", "first:1", "first:2", "ops:gelu", "ops:layer_norm"]"#;

fn all(sweep: &Sweep, folder: &Path, threads: usize) -> super::Results {
    run(sweep, folder, threads, |_| ControlFlow::Continue(())).unwrap().expect("nobody stopped it")
}

#[test]
fn rows_equal_plans_made_one_by_one() {
    let sweep = Sweep::parse(&(TINY.to_owned() + "[sweep]\nplan = \"all\"")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let results = all(&sweep, folder.path(), 2);
    assert_eq!(results.rows.len(), 24);
    let gpt = GptConfig { vocabulary: 64, layers: 4, heads: 2, width: 32, ..GptConfig::default() };
    for (configuration, row) in sweep.configurations.iter().zip(&results.rows) {
        let options = &configuration.step.as_ref().unwrap().options;
        let plan = |rank| crate::plan::step(|vb| Gpt::new(&gpt, vb), &options.clone().into(), rank);
        let Some(figures) = &row.figures else {
            // Eight sequences do not divide into three micro-batches, and `zbv` needs at least as many micro-batches as
            // ranks.
            assert_eq!(row.status, Status::Invalid);
            assert_eq!(row.why.as_deref(), Some(&*plan(0).unwrap_err().to_string()), "{:?}", configuration.values);
            continue;
        };
        let plans: Vec<Executable> = (0..2).map(|rank| plan(rank).unwrap()).collect();
        let live: Vec<u64> = plans.iter().map(|plan| plan.solution().lower_bound).collect();
        let arenas: Vec<u64> = plans.iter().map(Executable::arena_bytes).collect();
        let hashes: Vec<String> = plans.iter().map(|plan| plan.plan_hash().to_string()).collect();
        assert_eq!(
            (&figures.live_bytes, &figures.arena_bytes, &figures.plans),
            (&live, &arenas, &hashes),
            "{:?}",
            configuration.values
        );
        assert!(figures.at_least.iter().zip(&live).all(|(sure, live)| sure <= live), "{figures:?}");
        assert!(figures.reserved.values().all(|&bytes| bytes >= figures.live()));
    }
    assert!(results.rows.iter().filter(|row| row.status == Status::Fits).count() >= 16);
}

/// A configuration that is not planned is on no Pareto front of any menu, neither that of plans nor that of an
/// allocator.
#[test]
fn fronts_are_those_of_all_plans() {
    let wide = TINY.replace("[1, 2, 3, 4]", "[2, 4]").replace("[\"none\", \"layers\"]", RECOMPUTE);
    let wide = wide + "[[menu]]\nname = \"coarse\"\nrecompute = [\"none\", \"layers\"]\n";
    let fronts = |options: &str| {
        let sweep = Sweep::parse(&(wide.clone() + options)).unwrap();
        assert_eq!(sweep.menus, ["all", "coarse"]);
        let folder = tempfile::tempdir().unwrap();
        let rows = all(&sweep, folder.path(), 1).rows;
        let planned =
            rows.iter().filter(|row| row.figures.as_ref().is_some_and(|figures| !figures.plans.is_empty())).count();
        let names = ["gapless", "pytorch", "pytorch-expandable", "gmlake", "stalloc"];
        let front = |name: &str, menu: usize| {
            let bytes = |figures: &Figures| {
                if name == "gapless" { figures.arena() } else { figures.reserved.get(name).copied() }
            };
            let of_menu =
                sweep.configurations.iter().zip(&rows).filter(|(configuration, _)| configuration.menus.contains(&menu));
            let points = of_menu.filter_map(|(_, row)| row.figures.as_ref());
            let mut points: Vec<(u64, u64)> =
                points.filter_map(|figures| Some((figures.nanoseconds, bytes(figures)?))).collect();
            points.sort_unstable();
            let mut least = u64::MAX;
            points.retain(|&(_, bytes)| {
                let is_least = bytes < least;
                least = least.min(bytes);
                is_least
            });
            points
        };
        (planned, [0, 1].map(|menu| names.map(|name| front(name, menu))))
    };
    let (few, some) = fronts("");
    let (all, every) = fronts("[sweep]\nplan = \"all\"");
    assert_eq!(some, every);
    assert_ne!(some[0], some[1]);
    assert!(few < all, "{few} of {all}");
    // The sure bytes of gapless's own step bound no table of an eager framework.
    let eager = "[estimate]\nlowering = \"eager\"\n";
    let (_, some) = fronts(eager);
    let (_, every) = fronts(&format!("{eager}[sweep]\nplan = \"all\""));
    assert_eq!(some, every);
}

/// Under an eager framework, the rank with whole logits is the fullest, though it is not in gapless's own step. The
/// allocators replay the ranks that are full under the framework.
#[test]
fn eager_ranks_are_replayed_if_they_are_full() {
    let text = "[step]\nmodel = \"gpt:vocabulary=4096,layers=2,heads=2,width=32\"\nbatch = 16\nsequence = 64\n\
                pipeline_ranks = 2\nmicro_batches = 2\nlowering = \"eager\"\n[vary]\nschedule = [\"1f1b\"]\n";
    let sweep = Sweep::parse(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let results = all(&sweep, folder.path(), 1);
    let figures = results.rows[0].figures.as_ref().unwrap();
    let step = sweep.configurations[0].step.as_ref().unwrap();
    let graph = step.record().unwrap();
    let live = [0, 1].map(|rank| lower_bound(&step.eager(&graph, rank).unwrap()));
    assert!(figures.live_bytes[1] * 10 < figures.live_bytes[0] * 9 && live[0] < live[1], "{figures:?}, {live:?}");
    assert_eq!(figures.allocated, live[1]);
    assert!(!figures.reserved.is_empty() && figures.reserved.values().all(|&bytes| bytes >= live[1]), "{figures:?}");
    assert!(sweep.replays_eager());
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(page.contains("\"is_eager\":true"));
}

/// Steps that an eager framework does not have are known only when they are lowered. An interrupted sweep visits them in
/// the same rounds.
#[test]
fn refused_eager_steps_do_not_shift_rounds() {
    let text = TINY.replace("[1, 2, 3, 4]", "[2, 4]").replace("[\"none\", \"layers\"]", RECOMPUTE);
    let sweep = Sweep::parse(&(text + "[estimate]\nlowering = \"eager\"\n")).unwrap();
    let [whole, stopped] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let rows = all(&sweep, whole.path(), 1).rows;
    let refused = rows.iter().find(|row| row.why.as_deref().is_some_and(|why| why.contains("zbv"))).unwrap();
    assert_eq!((refused.status, refused.figures.as_ref().unwrap().arena()), (Status::Invalid, None));
    let page = fs::read_to_string(whole.path().join("report.html")).unwrap();
    assert!(!page.contains(&refused.key));
    let mut left = rows.len() + 14;
    let stop = |_| {
        left -= 1;
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    assert!(run(&sweep, stopped.path(), 1, stop).unwrap().is_none());
    all(&sweep, stopped.path(), 1);
    let [a, b] = [&whole, &stopped].map(|folder| fs::read(folder.path().join("results.jsonl")).unwrap());
    assert!(a == b);
}

/// Two tables of one's own have a timeline each. The memory of the device is the least of all meshes, and a map is on
/// its own rank's arena.
#[test]
fn a_page_tells_schedules_meshes_and_arenas_apart() {
    let folder = tempfile::tempdir().unwrap();
    let shape = Shape { ranks: 2, chunks: 1, micro_batches: 4 };
    let paths = ["gpipe", "1f1b"].map(|name| {
        let path = folder.path().join(format!("{name}.csv"));
        fs::write(&path, write_table(&by_name(name).unwrap().table(&shape).unwrap())).unwrap();
        path.display().to_string()
    });
    let text = TINY.replace("[\"1f1b\", \"gpipe\", \"zbv\"]", &format!("{paths:?}"));
    let text = text.replace("[1, 2, 3, 4]", "[4]").replace("recompute = [\"none\", \"layers\"]", "mesh.data = [1, 2]");
    let sweep = Sweep::parse(&(text + "[sweep]\nplan = \"all\"")).unwrap();
    let rows = all(&sweep, folder.path(), 1).rows;
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    let data = page.split_once("id=\"data\"").and_then(|(_, rest)| rest.split_once('>')).unwrap().1;
    let data: serde_json::Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    for path in &paths {
        assert!(data["tables"].get(format!("{path} 2 1 4")).is_some(), "{}", data["tables"]);
        assert!(data["rows"].as_array().unwrap().iter().any(|row| row["schedule"] == **path));
    }
    assert_eq!(data["tables"].as_object().unwrap().len(), 2);
    let capacities = sweep.configurations.iter().map(|one| one.step.as_ref().unwrap().device_bytes());
    assert_eq!(data["capacity"].as_u64(), capacities.clone().min());
    assert!(capacities.clone().min() < capacities.max() && data["is_least_capacity"] == true);
    for row in rows.iter().filter_map(|row| row.figures.as_ref()) {
        let fullest = (0..2).rev().max_by_key(|&rank| row.live_bytes[rank]).unwrap();
        assert_eq!(row.map_bytes, row.arena_bytes[fullest]);
    }
}

/// Summarizes three rows: one without a plan, one for which an allocator wastes a tenth, and one that fits only when
/// planned.
#[test]
fn rows_are_summed_up_by_allocator_and_budget() {
    let text = TINY.replace("[1, 2, 3, 4]", "[1, 2, 4]").replace("[\"1f1b\", \"gpipe\", \"zbv\"]", "[\"1f1b\"]");
    let text = text.replace("recompute = [\"none\", \"layers\"]", "") + "[sweep]\nallocators = [\"pytorch\"]";
    let sweep = Sweep::parse(&text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut rows = all(&sweep, folder.path(), 1).rows;
    let given = [(None, None, 5.0), (Some(900), Some(1000), 3.0), (Some(600), Some(1200), 2.0)];
    for (row, (arena, reserved, speed)) in rows.iter_mut().zip(given) {
        let figures = row.figures.as_mut().unwrap();
        figures.at_least = vec![arena.unwrap_or(900)];
        figures.live_bytes = figures.at_least.clone();
        figures.arena_bytes = arena.into_iter().collect();
        figures.served_bytes = figures.arena_bytes.clone();
        figures.allocated = arena.unwrap_or(900);
        figures.reserved = reserved.map(|bytes| ("pytorch".to_owned(), bytes)).into_iter().collect();
        figures.tokens_per_second = speed;
    }
    let [waste] = &fragmentation(&sweep, &rows)[..] else { panic!("one allocator") };
    assert_eq!((waste.allocator, waste.configurations, waste.planned, waste.reduction), ("pytorch", 2, 0.0, 1.0));
    assert!((waste.mean - 0.3).abs() < 1e-12 && (waste.most - 0.5).abs() < 1e-12, "{waste:?}");
    assert!(above_bound(&rows).is_empty());
    let throughput = throughput(&sweep, &rows);
    let at = |budget: u64| {
        throughput.iter().find(|point| point.budget == budget).map(|point| point.tokens_per_second[0].clone())
    };
    assert_eq!(at(592), None);
    assert_eq!(at(608), Some(vec![Some(2.0), None]));
    assert_eq!(at(912), Some(vec![Some(3.0), None]));
    let [gain] = &gains(&sweep, &throughput)[..] else { panic!("one menu, one allocator") };
    // Budgets are multiples of 16, up to 912. No configuration fits any of them under the allocator.
    assert_eq!((gain.budgets, gain.only_planned, gain.only_allocator), (0, 20, 0));
    assert_eq!((gain.mean_with_reserve, gain.budgets_with_reserve), (None, None));
    let figures = rows[1].figures.as_mut().unwrap();
    (figures.arena_bytes, figures.served_bytes) = (vec![1080], vec![1080]);
    assert_eq!(above_bound(&rows).len(), 1);
    let [waste] = &fragmentation(&sweep, &rows)[..] else { panic!("one allocator") };
    // The plan wastes 180 bytes where the allocator wastes 100, and 0 where it wastes 600.
    assert_eq!((waste.wasted_bytes, waste.planned_wasted_bytes), (700, 180));
    assert!((waste.reduction - (1.0 - 180.0 / 700.0)).abs() < 1e-12, "{waste:?}");
    // In the first row alone, the allocator saves 80 of the 180 bytes.
    let reduction = rows[1].figures.as_ref().unwrap().reduction(Kind::PYTORCH).unwrap();
    assert!((reduction + 80.0 / 180.0).abs() < 1e-12, "{reduction}");
    // Bytes that are reserved for other rows are not wasted, but they must fit the budget.
    rows[1].figures.as_mut().unwrap().arena_bytes = vec![1400];
    let reserve = unused_reserve(&rows).unwrap();
    assert_eq!((reserve.configurations, reserve.most_bytes, reserve.grown), (2, 320, 0));
    assert_eq!(fragmentation(&sweep, &rows)[0], *waste);
    let budgets = super::throughput(&sweep, &rows);
    let last = budgets.iter().rfind(|point| point.budget < 1400).unwrap();
    assert_eq!(last.tokens_per_second[0], [Some(2.0), Some(3.0), Some(3.0)]);
    let [gain] = &gains(&sweep, &budgets)[..] else { panic!("one menu, one allocator") };
    assert!(gain.mean_with_reserve < Some(gain.mean), "{gain:?}");
    // A budget that only an allocator fits counts, and so does one that a plan loses with its reserve.
    let one = |budget, arena, other, served| Throughput { budget, tokens_per_second: vec![vec![arena, other, served]] };
    let budgets = [
        one(1, None, Some(1.0), None),
        one(2, None, Some(1.0), Some(2.0)),
        one(3, Some(1.0), Some(1.0), Some(2.0)),
        one(4, Some(1.0), None, Some(2.0)),
    ];
    let [gain] = &gains(&sweep, &budgets)[..] else { panic!("one menu, one allocator") };
    assert_eq!((gain.budgets, gain.only_planned, gain.only_allocator), (2, 1, 1));
    assert_eq!((gain.mean, gain.mean_with_reserve, gain.budgets_with_reserve), (1.0, Some(0.0), Some(1)));
    // Rows of other commits are reused, and counted.
    assert_eq!(of_other_commits(&rows), 0);
    rows[0].origin.commit = Some("0123456789ab".to_owned());
    assert_eq!(of_other_commits(&rows), 1);
}

/// The plan and the allocators get the same rows of experts, under each load. Every reduction is what its columns say.
#[test]
fn mixtures_have_the_same_rows_on_all_sides() {
    let spec = r#"
        model = "moe:llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=64,router.experts=8,router.top_k=2,expert_hidden=64"
        step = { batch = 8, sequence = 32 }
        mesh.expert = 2
        memory.routing = 1.25
        [vary]
        micro_batches = [2, 4]
        expert_load = ["even", "skewed:1", "worst"]
        [sweep]
        plan = "all"
        fullest = 0.0
    "#;
    let sweep = Sweep::parse(spec).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows = all(&sweep, folder.path(), 1).rows;
    for row in &rows {
        let figures = row.figures.as_ref().unwrap();
        let (live, served, arena) = (figures.live(), figures.served().unwrap(), figures.arena().unwrap());
        assert!(live <= served && served <= arena, "{row:?}");
        assert_eq!(figures.allocated, live, "{row:?}");
        assert_eq!(row.configuration["expert_load"].as_str() == Some("worst"), figures.reserve_grown_to == Some(2.0));
        for (name, &reserved) in &figures.reserved {
            assert!(reserved >= live, "{name}: {row:?}");
            let (before, after) = ((reserved - live) as f64, (served - live) as f64);
            let expected = (before.max(after) > 0.0).then(|| (before - after) / before.max(after));
            assert_eq!(figures.reduction(name.parse().unwrap()), expected, "{name}: {row:?}");
        }
    }
    let live: Vec<u64> = rows[..3].iter().map(|row| row.figures.as_ref().unwrap().live()).collect();
    assert!(live.is_sorted() && live[0] < live[2], "{live:?}");
    // Keys of all configurations can be set from outside.
    let path = folder.path().join("spec.toml");
    fs::write(&path, spec.replace("expert_load = [\"even\", \"skewed:1\", \"worst\"]", "")).unwrap();
    let loads = ["even", "worst"].map(|load| {
        let sweep = Sweep::read(&path, &[format!("expert_load={load}")]).unwrap();
        sweep.configurations[0].step.as_ref().unwrap().expert_load.to_string()
    });
    assert_eq!(loads, ["even", "worst"]);
    assert!(Sweep::read(&path, &["expert_load=uneven".to_owned()]).unwrap_err().to_string().contains("expert_load"));
}

/// 1F1B under another name.
#[derive(Clone)]
struct Renamed;

impl Schedule for Renamed {
    fn name(&self) -> &'static str {
        "renamed-1f1b"
    }

    fn actions(&self, shape: &Shape) -> Result<Vec<Vec<Action>>, gapless_parallel::Error> {
        OneForwardOneBackward.actions(shape)
    }
}

#[derive(Debug)]
struct KeepAll;

impl RecomputePolicy for KeepAll {
    fn drops(&self, _: &Spec, _: &Node) -> bool {
        false
    }
}

/// Registered components have names like built-in ones, and the same results if they do the same.
#[test]
fn components_of_ones_own_are_swept() {
    Kind::register("malloc-again", false, |setup| Kind::MALLOC.build_with(setup)).unwrap();
    register(Renamed).unwrap();
    Recompute::register("keep-all", KeepAll).unwrap();
    assert!(Recompute::register("keep-all", KeepAll).unwrap_err().to_string().contains("already means a policy"));
    assert_eq!("keep-all".parse::<Recompute>().unwrap().to_string(), "keep-all");
    let spec = TINY
        .replace(r#"["1f1b", "gpipe", "zbv"]"#, r#"["1f1b", "renamed-1f1b"]"#)
        .replace("[1, 2, 3, 4]", "[2]")
        .replace(r#"["none", "layers"]"#, r#"["none", "keep-all"]"#);
    let sweep = Sweep::parse(&(spec + "[sweep]\nplan = \"all\"\nallocators = [\"malloc\", \"malloc-again\"]")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows = all(&sweep, folder.path(), 1).rows;
    let keys: HashSet<&String> = rows.iter().map(|row| &row.key).collect();
    assert_eq!((rows.len(), keys.len()), (4, 4));
    for row in &rows {
        let (figures, first) = (row.figures.as_ref().unwrap(), rows[0].figures.as_ref().unwrap());
        assert_eq!(figures.reserved["malloc-again"], figures.reserved["malloc"], "{row:?}");
        assert_eq!((&figures.plans, figures.nanoseconds), (&first.plans, first.nanoseconds), "{row:?}");
    }
    assert_eq!(fragmentation(&sweep, &rows).len(), 2);
}

#[test]
fn what_was_stopped_goes_on_to_the_same_files() {
    let sweep = Sweep::parse(TINY).unwrap();
    let [whole, stopped] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    all(&sweep, whole.path(), 1);
    for (rows, lines_then) in [(3, 3), (30, 33)] {
        let mut left = rows;
        let stop = |_| {
            left -= 1;
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        assert!(run(&sweep, stopped.path(), 2, stop).unwrap().is_none());
        // The file is as a process leaves it that was killed while it wrote.
        let path = stopped.path().join("results.jsonl");
        let lines = fs::read_to_string(&path).unwrap();
        assert_eq!(lines.lines().count(), lines_then);
        fs::write(&path, lines + "{\"key\":\"12").unwrap();
    }
    let reused = all(&sweep, stopped.path(), 2).reused;
    assert!((1..24).contains(&reused), "{reused}");
    for name in ["results.jsonl", "results.csv", "report.html"] {
        let [a, b] = [&whole, &stopped].map(|folder| fs::read(folder.path().join(name)).unwrap());
        assert!(a == b, "{name}");
    }
    // Another sweep in the same folder keeps all rows, and computes no row twice.
    let wider = Sweep::parse(&TINY.replace("[1, 2, 3, 4]", "[2, 8]")).unwrap();
    let results = all(&wider, whole.path(), 2);
    assert_eq!((results.rows.len(), results.reused), (12, 6));
    assert_eq!(all(&sweep, whole.path(), 1).reused, 24);
    // Rows that were edited, or have no hash, are computed again.
    let (path, file) =
        (whole.path().join("results.jsonl"), || fs::read_to_string(whole.path().join("results.jsonl")).unwrap());
    let lines = file();
    let edited = lines.replacen("\"nanoseconds\":", "\"nanoseconds\":1", 1);
    let (_, rest) = edited.split_once('\n').and_then(|(_, rest)| rest.split_once(',')).unwrap();
    let first = edited.lines().next().unwrap();
    fs::write(&path, format!("{first}\n{{{rest}")).unwrap();
    let results = all(&sweep, whole.path(), 1);
    assert_eq!((results.reused, results.changed), (22, 2));
    assert_eq!((all(&sweep, whole.path(), 1).changed, file() == lines), (0, true));
    fs::write(whole.path().join("results.jsonl"), format!("nothing\n{lines}")).unwrap();
    let error = run(&sweep, whole.path(), 1, |_| ControlFlow::Continue(())).unwrap_err().to_string();
    assert!(error.contains("results.jsonl, line 1"), "{error}");
}

#[test]
fn what_has_more_alive_than_the_device_is_not_planned() {
    let sweep = Sweep::parse(&(TINY.to_owned() + "[sweep]\ncapacity = \"100KiB\"")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for row in all(&sweep, folder.path(), 2).rows {
        let Some(figures) = row.figures else { continue };
        assert_eq!(row.status, Status::TooLarge);
        assert!(figures.live() > 100 << 10 && figures.arena_bytes.is_empty() && figures.reserved.is_empty());
        assert!(figures.nanoseconds > 0);
    }
}

#[test]
fn a_wrong_sweep_is_refused_with_its_key_and_a_remedy() {
    let check = |text: &str, words: &[&str]| {
        let error = Sweep::parse(text).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{text}\n{error}");
    };
    let step = |rest: &str| format!("[step]\nmodel = \"small\"\n{rest}");
    check("", &["vary: is missing", "write lists of values"]);
    check("[vary]\nmodel = [\"smal\"]", &["vary.model (line 2)", "unknown model \"smal\"", "docs/run_file.md"]);
    check(&step("[vary]\nschedul = [\"gpipe\"]"), &["vary.schedul (line 4)", "did you mean `schedule`?"]);
    check(&step("[vary]\nschedule = [\"1f1b\", \"2f2b\"]"), &["vary.schedule (line 4)", "2f2b", "docs/run_file.md"]);
    check(&step("[vary]\nschedule = \"1f1b\""), &["vary.schedule (line 4): is not a list", "write, for example, ["]);
    check(&step("[vary]\nbatch = []"), &["vary.batch (line 4)", "empty", "leave the key out"]);
    check(&step("[vary]\nbatch = [1, 2, 1]"), &["vary.batch (line 4): 1 appears twice", "once"]);
    check(&step("[vary]\nbatch = [1, \"two\"]"), &["vary.batch (line 4)", "string \"two\"", "docs/run_file.md"]);
    check(&step("[vary]\nbatch = [0]"), &["vary.batch (line 4): is 0", "at least 1"]);
    check(
        &step("[vary]\nrecompute = [\"none\", \"some\"]"),
        &["vary.recompute (line 4)", "not a policy", "use none, layers"],
    );
    check(&step("[vary]\nbudget = [\"1 parsec\"]"), &["vary.budget (line 4)", "is not a unit of bytes"]);
    check(&step("precision = \"f16\"\n[vary]\nbatch = [1]"), &["step.precision (line 3)", "unknown variant `f16`"]);
    check(&step("device = \"tpu\"\n[vary]\nbatch = [1]"), &["device (line 3)", "use auto, cpu, cuda"]);
    check(
        &step("profile = \"mi300\"\n[vary]\nbatch = [1]"),
        &["estimate.profile (line 3)", "a100-80, h100, h200, b200"],
    );
    check(&step("[vary]\nbatch = [1]\n[[skip]]\nbach = 1"), &["skip.bach", "did you mean `batch`?"]);
    check(&step("[vary]\nbatch = [1]\n[[skip]]\nbatch = 1"), &["skip: leaves no configuration", "skip less"]);
    check(
        &step("[vary]\nbatch = [1]\n[sweep]\nallocators = [\"jemalloc\"]"),
        &["sweep.allocators", "choose one of ideal"],
    );
    check(&step("[vary]\nbatch = [1]\n[sweep]\nallocators = [\"gapless\"]"), &["sweep.allocators", "in every row"]);
    check(&step("[vary]\nbatch = [1]\n[sweep]\nfullest = 2.0"), &["sweep.fullest", "from 0 to 1"]);
    check(&step("[vary]\nbatch = [1]\n[[menu]]\nbatch = 1"), &["menu (line 5): has no name", "name it"]);
    check(&step("[vary]\nbatch = [1]\n[[menu]]\nname = \"all\"\nbatch = 1"), &["name of another menu"]);
    check(&step("[vary]\nbatch = [1]\n[[menu]]\nname = \"few\"\nbach = 1"), &["did you mean `batch`?"]);
    check(&step("[vary]\nbatch = [1]\n[[menu]]\nname = \"few\""), &["has no key", "add a condition"]);
    check(&step("[vary]\nbatch = [1]\n[swep]"), &["swep (line 5): unknown field `swep`"]);
    check(&step("[vary]\nrouting = [1.0, nan]"), &["vary.routing (line 4): is NaN", "at least 0"]);
    check(&step("[vary]\nrouting = [nan, nan]"), &["vary.routing (line 4): nan appears twice"]);
    // Counts are refused before any value is looked at: none of these values is valid.
    let numbers = |count: usize| vec!["0"; count].join(",");
    check(&step(&format!("[vary]\nbatch = [{0}]\nsequence = [{0}]", numbers(400))), &["vary", "more than 100000"]);
    check(&step(&format!("[vary]\nbatch = [{}]", numbers(100_001))), &["vary", "more than 100000", "vary fewer"]);
    let menus = "[[menu]]\nbatch = 0\n".repeat(101);
    check(
        &step(&format!("[vary]\nbatch = [1]\n{menus}")),
        &["menu (line 5): 101 menus are more than the maximum of 100"],
    );
    let skips = "[[skip]]\nbatch = \"\"\n".repeat(10_000);
    check(&step(&format!("[vary]\nbatch = [1]\n{skips}")), &["skip", "20000 values of skip and menu", "vary fewer"]);
    let skip = format!("[[skip]]\nbatch = [{}]\n", numbers(20_000));
    check(&step(&format!("[vary]\nbatch = [1]\n{skip}")), &["skip", "20001 values of skip and menu"]);
}

/// Under every schedule, the sure bytes of the sketch are at most the live bytes of the compiled step. The sketch's
/// time is within 1 % of the compiled step's time.
#[test]
fn a_sketch_bounds_the_step() {
    let mut checked = 0;
    for schedule in gapless_parallel::all() {
        for (chunks, recompute) in [(1, "none"), (2, "none"), (1, "layers"), (2, "layers")] {
            let text = format!(
                "model = 'gpt:vocabulary=64,layers=4,heads=2,width=32'\nsequence = 16\nbatch = 16\nmicro_batches = 8\n\
                 precision = 'bf16'\npipeline_ranks = 2\nschedule = '{}'\nchunks = {chunks}\nrecompute = '{recompute}'",
                schedule.name()
            );
            let keys: Vec<String> = text.lines().map(str::to_owned).collect();
            let step = Step::new(&RunConfig::parse("", &keys).unwrap()).unwrap();
            let Ok(Some(key)) = step.sketch_key() else { continue };
            let graph = step.record().unwrap();
            let (sketch, programs) = (step.sketch(&graph, &key).unwrap(), step.programs(&graph).unwrap());
            let live = programs.iter().map(|program| lower_bound(&table(program).unwrap()));
            for (sure, live) in step.surely_alive(&sketch).unwrap().into_iter().zip(live) {
                assert!(sure <= live && sure * 2 > live, "{text}: {sure} of {live}");
                checked += 1;
            }
            let [sketched, whole] =
                [step.timing_by(&sketch), step.timing(&programs)].map(|timing| timing.unwrap().nanoseconds());
            assert!(sketched.abs_diff(whole) * 100 <= whole, "{text}: {sketched} ns, {whole}");
        }
    }
    assert!(checked > 40, "{checked}");
}

/// The estimate hides gathers and sums over shard ranks only as far as the program computes meanwhile.
#[test]
fn estimates_overlap_what_programs_overlap() {
    let nanoseconds = |ahead: usize| {
        let text = format!(
            "model = 'gpt:vocabulary=64,layers=4,heads=2,width=32'\nsequence = 16\nbatch = 16\nmicro_batches = 4\n\
             shard_ranks = 2\nprefetch = {ahead}\nreductions = {ahead}"
        );
        let keys: Vec<String> = text.lines().map(str::to_owned).collect();
        let step = Step::new(&RunConfig::parse("", &keys).unwrap()).unwrap();
        let programs = step.programs(&step.record().unwrap()).unwrap();
        step.timing(&programs).unwrap().nanoseconds()
    };
    let [none, one, two] = [0, 1, 2].map(nanoseconds);
    assert!(none > one && one >= two, "{none} ns, {one} ns and {two} ns");
}

/// All axes of the mesh vary together, and only meshes of four ranks are kept. Each row has the bytes of plans made one by
/// one, and the sketch bounds the step.
#[test]
fn meshes_of_a_number_of_ranks() {
    let text = "[step]\nmodel = \"gpt:vocabulary=64,layers=4,heads=4,width=32\"\nbatch = 8\nmicro_batches = 2\nsequence = 16\n\
                [vary]\ntensor_ranks = [1, 2, 4]\npipeline_ranks = [1, 2, 4]\ndata_ranks = [1, 2, 4]\n\
                sequence_parallel = [false, true]\n[sweep]\nplan = \"all\"\nranks = 4\n";
    let sweep = Sweep::parse(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows = all(&sweep, folder.path(), 2).rows;
    // 4 is a product of three ordered factors in six ways.
    assert_eq!(rows.len(), 2 * 6);
    let mut times = HashSet::new();
    for (configuration, row) in sweep.configurations.iter().zip(&rows) {
        let step = configuration.step.as_ref().unwrap();
        let Some(figures) = &row.figures else {
            assert!(row.why.as_ref().unwrap().contains("step.sequence_parallel: there is one tensor rank"), "{row:?}");
            continue;
        };
        assert_eq!(step.options.mesh.ranks().unwrap(), 4);
        let graph = step.record().unwrap();
        let programs = step.programs(&graph).unwrap();
        let live: Vec<u64> = programs.iter().map(|program| lower_bound(&table(program).unwrap())).collect();
        assert_eq!(figures.live_bytes, live, "{:?}", configuration.values);
        assert!(figures.at_least.iter().zip(&live).all(|(sure, live)| sure <= live), "{figures:?}");
        let whole = step.timing(&programs).unwrap().nanoseconds();
        assert!(figures.nanoseconds.abs_diff(whole) * 100 <= whole, "{:?}: {whole} ns", configuration.values);
        times.insert(figures.nanoseconds);
    }
    assert!(rows.iter().filter(|row| row.status == Status::Fits).count() == 9 && times.len() == 9);
    let none = Sweep::parse(&text.replace("ranks = 4\n", "ranks = 5\n")).unwrap_err().to_string();
    assert!(none.contains("sweep.ranks") && none.contains("no mesh has 5 ranks"), "{none}");
}

/// Every axis of the mesh and every setting of its ranks can vary, and the data ranks are what the other axes leave. Sketches
/// bound the steps.
#[test]
fn all_axes_vary_together() {
    let text = "[step]\nmodel = \"moe:llama.vocabulary=64,llama.layers=2,llama.heads=2,llama.kv_heads=2,llama.width=32,router.experts=4,router.top_k=2,expert_hidden=32\"\nbatch = 8\n\
                micro_batches = 2\nsequence = 16\n\
                [vary]\ntensor_ranks = [1, 2]\ncontext_ranks = [1, 2]\nshard_ranks = [1, 2]\nexpert_ranks = [1, 2]\n\
                pipeline_ranks = [1, 2]\nzero_stage = [2, 3]\nprefetch = [0, 1]\nreductions = [0, 1]\nfold = [[], [\"tensor\"]]\n\
                [[skip]]\nshard_ranks = 1\nzero_stage = 2\n[[skip]]\nshard_ranks = 1\nprefetch = 0\n\
                [[skip]]\nshard_ranks = 1\nreductions = 0\n[[skip]]\ntensor_ranks = 1\nfold = [\"tensor\"]\n\
                [sweep]\nranks = 4\nallocators = []\n";
    let sweep = Sweep::parse(text).unwrap();
    assert_eq!(sweep.varied.last().unwrap(), "data_ranks");
    let folder = tempfile::tempdir().unwrap();
    let rows = all(&sweep, folder.path(), 2).rows;
    let mut seen = HashSet::new();
    for (configuration, row) in sweep.configurations.iter().zip(&rows) {
        let options = &configuration.step.as_ref().unwrap().options;
        assert_eq!(options.mesh.ranks().unwrap(), 4);
        assert_eq!(configuration.values["data_ranks"].as_integer(), Some(options.mesh.data as i64));
        let figures = row.figures.as_ref().unwrap_or_else(|| panic!("{row:?}"));
        assert!(figures.at_least.iter().zip(&figures.live_bytes).all(|(sure, live)| sure <= live), "{row:?}");
        seen.extend(configuration.values.iter().map(|(key, value)| format!("{key} {value}")));
    }
    assert_eq!(seen.len(), 9 * 2 + 3, "{seen:?}");
}

/// The refusal of a budget names the rank that needs most, which is not the first one here.
#[test]
fn a_budget_is_refused_for_the_fullest_rank() {
    let text = "[step]\nmodel = \"gpt:vocabulary=64,layers=8,heads=2,width=32\"\nbatch = 4\nmicro_batches = 2\nsequence = 16\n\
                pipeline_ranks = 2\ncut = [\"h.1\"]\nbudget = \"1KiB\"\n[vary]\nschedule = [\"1f1b\"]\n";
    let sweep = Sweep::parse(text).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let rows = all(&sweep, folder.path(), 1).rows;
    let step = sweep.configurations[0].step.as_ref().unwrap();
    let graph = step.record().unwrap();
    let needs = |rank| step.program(&graph, rank).unwrap_err().to_string();
    let why = rows[0].why.as_deref().unwrap();
    assert_eq!((rows[0].status, why), (Status::OverBudget, &*format!("rank 1: {}", needs(1))), "{}", needs(0));
}

/// The time of a single rank is the sum of its operations' times.
#[test]
fn one_rank_takes_what_its_operations_take() {
    let text = "model = 'gpt:vocabulary=64,layers=2,heads=2,width=32'\nstep.sequence = 16";
    let step = Step::new(&RunConfig::parse(text, &[]).unwrap()).unwrap();
    let program = step.program(&step.record().unwrap(), 0).unwrap();
    let each = program.instrs.iter().map(|instr| step.device.nanoseconds(instr, step.precision()));
    let timing = step.timing(std::slice::from_ref(&program)).unwrap();
    assert_eq!((timing.nanoseconds(), timing.timeline.bubble_share()), (each.sum(), 0.0));
    assert!(program.instrs.len() as u64 * 2_000 <= timing.nanoseconds());
}
