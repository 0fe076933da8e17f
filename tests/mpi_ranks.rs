//! Training on ranks that are processes. The results must be bit-identical to those of one rank. If ranks share
//! experts, the results must be bit-identical to those of the same number of threads. If a rank is killed, the whole
//! job ends, and can be resumed from its last checkpoint.
//!
//! The program runs itself under `mpirun`, so it has its own `main`. Without the feature `mpi`, or without `mpirun`,
//! it reports that the tests are skipped and ends.

#[cfg(feature = "mpi")]
mod common;

fn main() {
    #[cfg(not(feature = "mpi"))]
    gapless_testing::only_test("mpi_ranks", || gapless_testing::not_checked("built without the feature `mpi`"));
    #[cfg(feature = "mpi")]
    jobs::main();
}

#[cfg(feature = "mpi")]
mod jobs {
    use std::path::Path;
    use std::process::{Command, Output};

    use gapless::communicator::{self, Communicator};
    use gapless::engine::checkpoint::Checkpoint;
    use gapless::models::MoeStyle;
    use gapless::parallel::Axes;
    use gapless::run::{Console, RunConfig, Start, train};
    use gapless::{Mesh, Overflow, Pipeline, Reserve};
    use gapless_testing::{not_checked, only_test};

    use crate::common::{Kind, Outcome, TinyRun};

    const STEPS: u64 = 2;
    /// The rank that is killed and the step at which it is killed, which is after the checkpoint.
    const CULPRIT: usize = 1;

    pub fn main() {
        let arguments: Vec<String> = std::env::args().collect();
        match &arguments[..] {
            [_, flag, job, schedule, dir] if flag == "--job" => rank(job, schedule, Path::new(dir)),
            _ => only_test("mpi_ranks", || match Command::new("mpirun").arg("--version").output() {
                Err(error) => not_checked(format_args!("mpirun cannot be run: {error}")),
                Ok(_) => [2, 4].into_iter().for_each(|ranks| {
                    check(ranks);
                    judge_experts(ranks);
                    judge_tensors(ranks);
                    judge_file(ranks);
                }),
            }),
        }
    }

    fn run(ranks: usize, name: &str) -> TinyRun {
        let schedule = gapless::parallel::by_name(name).expect("the name of a schedule");
        let shape = |chunks| gapless::parallel::Shape { ranks: ranks as u32, chunks, micro_batches: 8 };
        let chunks = [1, 2].into_iter().find(|&chunks| schedule.actions(&shape(chunks)).is_ok());
        let chunks = chunks.expect("one or two chunks") as usize;
        let mut run = TinyRun::default();
        run.options.threads = 1;
        run.options.step.micro_batches = 8;
        run.options.step.mesh = Mesh::pipeline(ranks);
        run.options.step.pipeline = Pipeline { schedule: schedule.into(), chunks, ..Pipeline::default() };
        run
    }

    /// Creates a run on expert ranks in a pipeline of `stages` stages.
    fn experts(ranks: usize, stages: usize, style: MoeStyle) -> TinyRun {
        let mut run = TinyRun { kind: Kind::Moe(style), ..TinyRun::default() };
        run.options.threads = 1;
        run.options.step.mesh = Mesh { pipeline: stages, expert: ranks / stages, ..Mesh::default() };
        run.options.step.micro_batches = 4 / run.options.step.mesh.expert;
        run.options.poison = true;
        run
    }

    /// Creates a run on tensor and data ranks that all hold different experts.
    fn folded(ranks: usize, style: MoeStyle) -> TinyRun {
        let mut run = experts(1, 1, style);
        let (data, fold) = (ranks / 2, Axes::DATA | Axes::TENSOR);
        run.options.step.mesh = Mesh { data, tensor: 2, fold, ..Mesh::default() };
        run.options.step.micro_batches = 4 / data;
        run.options.step.sequence_parallel = true;
        run
    }

    /// Creates a run on expert ranks whose reserve is half of the rows of even routing.
    fn without_room(ranks: usize, style: MoeStyle, overflow: Overflow) -> TinyRun {
        let mut run = experts(ranks, 1, style);
        run.options.step.memory.routing = Reserve::Balanced { factor: 0.5 };
        run.options.step.memory.overflow = overflow;
        run
    }

    /// Creates a run on ranks that divide tensors: tensor ranks, which may also divide the tokens, or shard ranks.
    fn tensors(ranks: usize, name: &str) -> TinyRun {
        let mut run = TinyRun::default();
        run.options.threads = 1;
        run.options.step.mesh = match name {
            "fully sharded" => Mesh { shard: ranks, ..Mesh::default() },
            _ => Mesh { tensor: ranks, ..Mesh::default() },
        };
        run.options.step.sequence_parallel = name == "sequence parallel" && ranks > 1;
        run
    }

    const STYLES: [(&str, MoeStyle); 3] =
        [("mixtral", MoeStyle::Mixtral), ("switch", MoeStyle::Switch), ("deep-seek", MoeStyle::DeepSeek)];

    /// Runs one process. Its job is a run on the pipeline stages of a schedule, or on ranks that share the experts of a
    /// mixture.
    fn rank(job: &str, name: &str, dir: &Path) {
        let world = communicator::world().expect("under mpirun there is a world");
        let (rank, ranks) = (world.rank(), world.size());
        let style = STYLES.into_iter().find(|(style, _)| *style == name);
        let run = match (job, style) {
            ("experts" | "overflow", Some((_, style))) => experts(ranks, 1, style),
            ("rows that are let go", Some((_, style))) => without_room(ranks, style, Overflow::Recompute),
            ("an arena that grows", Some((_, style))) => without_room(ranks, style, Overflow::Grow),
            ("stages of experts", Some((_, style))) => experts(ranks, 2, style),
            ("folded experts", Some((_, style))) => folded(ranks, style),
            ("tensors", _) => tensors(ranks, name),
            _ => run(ranks, name),
        };
        if job == "overflow" {
            overflow(run, world);
        }
        let mut trainer = run.rank(Some(world));
        if job == "resume" {
            trainer.resume(&Checkpoint::latest(dir).unwrap().expect("one was saved")).unwrap();
        }
        let outcome = run.go_on(&mut trainer, STEPS);
        trainer.check_run().expect("nothing that lived at the same time shares bytes");
        let has_room = trainer.routing().is_none_or(|report| report.evicted + report.growths == 0);
        assert_eq!(has_room, run.options.step.memory.overflow == Overflow::Error, "{:?}", trainer.routing());
        if job == "kill" {
            trainer.save(dir, serde_json::Value::Null).unwrap();
            run.step(&mut trainer);
            if rank == CULPRIT {
                Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
            }
            run.go_on(&mut trainer, 1000);
            unreachable!("the job ends with the rank that was killed");
        }
        if rank == 0 {
            println!("{}", text(&outcome));
        }
    }

    /// Routes all tokens to the first experts, with a reserve that only suffices for even routing.
    fn overflow(mut run: TinyRun, world: Box<dyn Communicator>) -> ! {
        run.options.step.memory.routing = Reserve::Balanced { factor: 1.0 };
        let mut trainer = run.rank(Some(world));
        let names: Vec<String> = trainer.parameter_names().map(Into::into).collect();
        for name in names.iter().filter(|name| name.ends_with(".gate.weight")) {
            // If scores are equal, the first experts are chosen.
            let alike = trainer.tensor(name).and_then(|weight| Ok(weight.zeros_like()?)).unwrap();
            trainer.set_tensor(name, &alike).unwrap();
        }
        let (tokens, targets) = run.batch(0);
        eprintln!("{}", trainer.step(&tokens, &targets).expect_err("there is no room"));
        std::process::exit(1)
    }

    fn text(outcome: &Outcome) -> String {
        format!("outcome {:?} {:?}", outcome.losses, outcome.gradient_norms)
    }

    fn check(ranks: usize) {
        let mut straight = TinyRun::default().trainer();
        let first = text(&TinyRun::default().go_on(&mut straight, STEPS));
        let second = text(&TinyRun::default().go_on(&mut straight, STEPS));
        let dir = std::env::temp_dir().join(format!("gapless-mpi-{}-{ranks}", std::process::id()));

        for schedule in ["gpipe", "1f1b", "interleaved", "zb-h1", "interleaved-zb", "zbv", "dualpipev"] {
            let output = mpirun(ranks, "steps", schedule, &dir);
            assert!(output.status.success(), "{schedule} on {ranks} processes: {}", said(&output));
            let same = said(&output).lines().any(|line| line == first);
            assert!(same, "{schedule} on {ranks} processes: {}\ninstead of {first}", said(&output));
            println!("test mpi_ranks, {ranks} processes, {schedule}: the bits of one rank alone");
        }
        let output = mpirun(ranks, "kill", "1f1b", &dir);
        assert!(!output.status.success(), "the job outlived a killed rank: {}", said(&output));
        assert!(said(&output).contains(&format!("rank {CULPRIT}")), "nobody names the rank: {}", said(&output));
        let output = mpirun(ranks, "resume", "1f1b", &dir);
        let same = said(&output).lines().any(|line| line == second);
        assert!(same, "resumed on {ranks} processes: {}\ninstead of {second}", said(&output));
        println!("test mpi_ranks, {ranks} processes: killed, resumed, the bits of never having stopped");
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Processes exchange rows like threads. So the results are bit-identical to those of the same number of threads,
    /// and equal to those of one rank up to rounding. f32 rounds at 6e-8, and each rank first sums losses and gradients
    /// of its share of the batch, in sums of a few thousand terms.
    fn judge_experts(ranks: usize) {
        for (name, style) in STYLES {
            let alone = experts(1, 1, style).steps(STEPS);
            for (stages, job) in [
                (1, "experts"),
                (2, "stages of experts"),
                (1, "folded experts"),
                (1, "rows that are let go"),
                (1, "an arena that grows"),
            ] {
                if ranks / stages == 1 {
                    continue;
                }
                let run = match job {
                    "folded experts" => folded(ranks, style),
                    _ => experts(ranks, stages, style),
                };
                let threads = run.on_ranks(|mut trainer| run.go_on(&mut trainer, STEPS));
                let (threads, what) = (&threads[0], format!("{name}, {job}, on {ranks} processes"));
                let output = mpirun(ranks, job, name, &std::env::temp_dir());
                assert!(output.status.success(), "{what}: {}", said(&output));
                let same = said(&output).lines().any(|line| line == text(threads));
                assert!(same, "{what}: {}\ninstead of {}", said(&output), text(threads));
                let both = |outcome: &Outcome| [&outcome.losses[..], &outcome.gradient_norms].concat();
                for (a, b) in both(threads).into_iter().zip(both(&alone)) {
                    let (a, b) = (f32::from_bits(a), f32::from_bits(b));
                    assert!((a - b).abs() <= 2e-5 * b.abs(), "{what}: {a} instead of {b}");
                }
                println!("test mpi_ranks, {what}: the bits of as many threads, and one rank to rounding");
            }
        }
        let output = mpirun(ranks, "overflow", "mixtral", &std::env::temp_dir());
        assert!(!output.status.success(), "the job outlived an overflow: {}", said(&output));
        assert!(said(&output).contains("use Reserve::Worst"), "nobody says what helps: {}", said(&output));
        println!("test mpi_ranks, {ranks} processes: an overflow ends the job and says what helps");
    }

    /// Processes divide tensors like threads.
    fn judge_tensors(ranks: usize) {
        for name in ["tensor parallel", "sequence parallel", "fully sharded"] {
            let run = tensors(ranks, name);
            let threads = run.on_ranks(|mut trainer| run.go_on(&mut trainer, STEPS));
            let output = mpirun(ranks, "tensors", name, &std::env::temp_dir());
            assert!(output.status.success(), "{name} on {ranks} processes: {}", said(&output));
            let same = said(&output).lines().any(|line| line == text(&threads[0]));
            assert!(same, "{name} on {ranks} processes: {}\ninstead of {}", said(&output), text(&threads[0]));
            println!("test mpi_ranks, {name} on {ranks} processes: the bits of as many threads");
        }
    }

    /// The ranks of a run file compute the same bits as processes and as threads of one process.
    fn judge_file(ranks: usize) {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("text.txt"), "to be or not to be, that is the question\n".repeat(200)).unwrap();
        let text = format!(
            "steps = 4\nthreads = 1\n[model.gpt]\nlayers = 4\nheads = 2\nwidth = 16\n[data]\npath = {:?}\nvocabulary = 256\ncache = {:?}\n\
             [step]\nbatch = 8\nmicro_batches = 4\nsequence = 16\n[pipeline]\nschedule = \"zb-h1\"\n\
             [mesh]\npipeline = 2\ndata = {}\n[sample]\nprompt = \"to be\"\ntokens = 4\n",
            path("text.txt"),
            path("cache"),
            ranks / 2
        );
        std::fs::write(path("run.toml"), text).unwrap();
        let config = RunConfig::read(&path("run.toml"), &[]).unwrap();
        train(&config, &path("threads"), &Start::Anew, &mut Console::silent(), |_| {}).unwrap();
        let run = ["train", path("run.toml").to_str().unwrap(), "--out", path("processes").to_str().unwrap()]
            .map(String::from);
        let start = |ranks| processes(ranks, Path::new(env!("CARGO_BIN_EXE_gapless")), &run);
        let output = start(ranks);
        assert!(output.status.success(), "{}", said(&output));
        let losses = |out: &str| {
            let rows = std::fs::read_to_string(path(out).join("metrics.jsonl")).unwrap();
            let rows = rows.lines().map(|row| serde_json::from_str::<serde_json::Value>(row).unwrap());
            rows.map(|row| [row["loss"].to_string(), row["val_loss"].to_string()]).collect::<Vec<_>>()
        };
        assert_eq!(losses("processes"), losses("threads"));
        let output = start(ranks + 1);
        assert!(!output.status.success() && said(&output).contains("start one process, or one for each rank"));
        println!("test mpi_ranks, a file's run on {ranks} processes: the bits of as many threads");
    }

    fn mpirun(ranks: usize, job: &str, schedule: &str, dir: &Path) -> Output {
        let arguments = ["--job", job, schedule, dir.to_str().unwrap()].map(String::from);
        processes(ranks, &std::env::current_exe().unwrap(), &arguments)
    }

    fn processes(ranks: usize, program: &Path, arguments: &[String]) -> Output {
        gapless_testing::mpirun(ranks).env("RUST_BACKTRACE", "0").arg(program).args(arguments).output().unwrap()
    }

    fn said(output: &Output) -> String {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    }
}
