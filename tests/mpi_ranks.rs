//! Training over ranks that are processes: the bits of one rank alone, and a job that ends when a rank is killed and goes
//! on from its last checkpoint.
//!
//! The program runs itself under `mpirun`, so it has a `main` of its own. Without the feature `mpi`, or without `mpirun`,
//! it says so and ends.

#[cfg(feature = "mpi")]
mod common;

fn main() {
    if std::env::args().any(|argument| argument == "--list") {
        println!("mpi_ranks: test");
        return;
    }
    #[cfg(not(feature = "mpi"))]
    println!("test mpi_ranks ... skipped: built without the feature `mpi`");
    #[cfg(feature = "mpi")]
    jobs::main();
}

#[cfg(feature = "mpi")]
mod jobs {
    use std::path::Path;
    use std::process::{Command, Output};

    use gapless::communicator;
    use gapless::engine::checkpoint::Checkpoint;
    use gapless::{Mesh, Pipeline};

    use crate::common::{Outcome, Run};

    const STEPS: u64 = 2;
    /// The rank that is killed, and at which step: after the checkpoint.
    const CULPRIT: usize = 1;

    pub fn main() {
        let arguments: Vec<String> = std::env::args().collect();
        match &arguments[..] {
            [_, job, schedule, dir] => rank(job, schedule, Path::new(dir)),
            _ => match Command::new("mpirun").arg("--version").output() {
                Err(error) => println!("test mpi_ranks ... skipped: mpirun cannot be run: {error}"),
                Ok(_) => [2, 4].into_iter().for_each(judge),
            },
        }
    }

    fn run(ranks: usize, name: &str) -> Run {
        let schedule = gapless::parallel::by_name(name).expect("the name of a schedule");
        let shape = |chunks| gapless::parallel::Shape { ranks: ranks as u32, chunks, micro_batches: 8 };
        let chunks = [1, 2].into_iter().find(|&chunks| schedule.actions(&shape(chunks)).is_ok());
        let chunks = chunks.expect("one or two chunks") as usize;
        let mut run = Run::default();
        run.options.threads = 1;
        run.options.micro_batches = 8;
        run.options.mesh = Mesh::pipeline(ranks);
        run.options.pipeline = Pipeline { schedule: schedule.into(), chunks, ..Pipeline::default() };
        run
    }

    /// What one process does.
    fn rank(job: &str, schedule: &str, dir: &Path) {
        let world = communicator::world().expect("under mpirun there is a world");
        let (rank, run) = (world.rank(), run(world.size(), schedule));
        let mut trainer = run.rank(Some(world));
        if job == "resume" {
            trainer.resume(&Checkpoint::latest(dir).unwrap().expect("one was saved")).unwrap();
        }
        let outcome = run.go_on(&mut trainer, STEPS);
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

    fn text(outcome: &Outcome) -> String {
        format!("outcome {:?} {:?}", outcome.losses, outcome.gradient_norms)
    }

    fn judge(ranks: usize) {
        let mut straight = Run::default().trainer();
        let first = text(&Run::default().go_on(&mut straight, STEPS));
        let second = text(&Run::default().go_on(&mut straight, STEPS));
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

    fn mpirun(ranks: usize, job: &str, schedule: &str, dir: &Path) -> Output {
        Command::new("mpirun")
            .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), ("RUST_BACKTRACE", "0")])
            .args(["--oversubscribe", "--mca", "btl_tcp_if_include", "lo", "-n", &ranks.to_string()])
            .arg(std::env::current_exe().unwrap())
            .args([job, schedule])
            .arg(dir)
            .output()
            .unwrap()
    }

    fn said(output: &Output) -> String {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    }
}
