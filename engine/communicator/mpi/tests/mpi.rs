//! Ranks that are processes: the cases of all backends under `mpirun`, and the end of a job when a rank fails.
//!
//! The program runs itself under `mpirun`, so it has its own `main`. Without the feature `mpi`, or if `mpirun` is
//! missing, it says so and ends.

#[cfg(feature = "mpi")]
#[path = "../../tests/communicator_cases/mod.rs"]
mod communicator_cases;

fn main() {
    #[cfg(not(feature = "mpi"))]
    gapless_testing::only_test("mpi", || gapless_testing::not_checked("built without the feature `mpi`"));
    #[cfg(feature = "mpi")]
    jobs::main();
}

#[cfg(feature = "mpi")]
mod jobs {
    use std::io::{BufRead, BufReader, Read};
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use gapless_communicator::{Communicator, Result, Tag};
    use gapless_mpi::Mpi;
    use gapless_testing::{mpirun, not_checked, only_test};

    use crate::communicator_cases::CASES;

    /// The rank that fails.
    const CULPRIT: usize = 1;
    /// The time that a rank waits for a rank that hangs.
    const SHORT: Duration = Duration::from_secs(1);

    pub fn main() {
        let arguments: Vec<String> = std::env::args().collect();
        if let [_, flag, job] = &arguments[..]
            && flag == "--job"
        {
            return run(job);
        }
        only_test("mpi", || match Command::new("mpirun").arg("--version").output() {
            Err(error) => not_checked(format_args!("mpirun cannot be run: {error}")),
            Ok(version) if !String::from_utf8_lossy(&version.stdout).contains("Open MPI") => {
                not_checked("mpirun is not OpenMPI's, whose flags this test knows");
            }
            Ok(_) => [2, 4].into_iter().for_each(test),
        });
    }

    /// The work of a process under `mpirun`.
    fn run(job: &str) {
        let mut world = match Mpi::world() {
            Ok(world) => world,
            Err(error) => {
                eprintln!("no world: {error}");
                std::process::exit(3);
            }
        };
        let culprit = world.rank() == CULPRIT;
        let ended = match job {
            "cases" => cases(&mut world),
            "all_reduce" => time_all_reduce(&mut world),
            "huge" => huge(&mut world),
            "panic" if culprit => panic!("as the test wants it"),
            "panic of a thread" if culprit => {
                let _ = std::thread::spawn(|| panic!("as the test wants it")).join();
                unreachable!("the job ends in the panic")
            }
            "exit" if culprit => std::process::exit(7),
            "abort" if culprit => {
                world.abort("the disk is full");
                unreachable!("the job ends in the abort")
            }
            "leave" if culprit => {
                let mut byte = [0];
                // A message that no rank sends. SAFETY: the communicator is dropped before the byte.
                let _request = unsafe { world.irecv(byte.as_mut_ptr(), 1, 0, Tag { stage: 9, ..Tag::default() }) };
                drop(world);
                unreachable!("the job ends in the drop")
            }
            "leave in order" if culprit => Ok(()),
            "leave when done" => leave_when_done(&mut world),
            "kill" | "hang" | "hang in a sum" if culprit => {
                world.barrier().expect("all ranks are there");
                println!("pid {}", std::process::id());
                loop {
                    std::thread::park();
                }
            }
            "kill" => world.barrier().and_then(|()| wait_for_the_culprit(&mut world)),
            "hang" | "hang in a sum" => {
                // This barrier has the long timeout, since the other ranks may start late.
                let all_are_there = world.barrier();
                world.set_timeout(SHORT);
                all_are_there.and_then(|()| match job {
                    "hang" => wait_for_the_culprit(&mut world),
                    _ => world.all_reduce(&mut [1.0; 100]),
                })
            }
            "sizes" => match culprit {
                true => world.send(&[0; 8], 0, Tag { micro_batch: 4, ..Tag::default() }),
                false if world.rank() == 0 => {
                    world.receive(&mut [0; 12], CULPRIT, Tag { micro_batch: 4, ..Tag::default() })
                }
                false => world.barrier(),
            },
            "too long" => match culprit {
                true => world.send(&[0; 16], 0, Tag::default()),
                false if world.rank() == 0 => world.receive(&mut [0; 12], CULPRIT, Tag::default()),
                false => world.barrier(),
            },
            _ => wait_for_the_culprit(&mut world),
        };
        if let Err(error) = ended {
            eprintln!("rank {} ended with: {error}", world.rank());
            std::process::exit(1);
        }
    }

    fn cases(world: &mut dyn Communicator) -> Result<()> {
        for (name, case) in CASES {
            case(world).inspect_err(|error| eprintln!("{name}: {error}"))?;
            if world.rank() == 0 {
                println!("case {name}");
            }
        }
        Ok(())
    }

    fn wait_for_the_culprit(world: &mut dyn Communicator) -> Result<()> {
        world.receive(&mut [0], CULPRIT, Tag { stage: 2, micro_batch: 7, ..Tag::default() })
    }

    /// The culprit shuts down before its last messages are received. The other ranks continue.
    fn leave_when_done(world: &mut dyn Communicator) -> Result<()> {
        let mut others = world.split(usize::from(world.rank() == CULPRIT), 0)?;
        match world.rank() {
            CULPRIT => (0..50).try_for_each(|i| world.send(&[7; 1000], 0, Tag { micro_batch: i, ..Tag::default() })),
            0 => {
                (0..1000).try_for_each(|_| others.barrier())?;
                (0..50)
                    .try_for_each(|i| world.receive(&mut [0; 1000], CULPRIT, Tag { micro_batch: i, ..Tag::default() }))
            }
            _ => (0..1000).try_for_each(|_| others.barrier()),
        }
    }

    /// Prints the milliseconds that a sum of 64 MiB takes, as the median of 9 measurements.
    fn time_all_reduce(world: &mut dyn Communicator) -> Result<()> {
        let mut values = vec![1.0; 16 << 20];
        let mut times = Vec::new();
        for _ in 0..9 {
            world.barrier()?;
            let start = Instant::now();
            world.all_reduce(&mut values)?;
            times.push(start.elapsed());
        }
        times.sort();
        if world.rank() == 0 {
            println!("all_reduce of 64 MiB on {} ranks: {:.1} ms", world.size(), times[4].as_secs_f64() * 1e3);
        }
        Ok(())
    }

    /// Sends one message with more bytes than MPI can count. It is too large for a regular test; run `--job huge` by
    /// hand.
    fn huge(world: &mut dyn Communicator) -> Result<()> {
        const LEN: usize = (1 << 31) + 12_345;
        let byte = |i: usize| (i % 251) as u8;
        match world.rank() {
            0 => world.send(&(0..LEN).map(byte).collect::<Vec<_>>(), 1, Tag::default()),
            1 => {
                let mut bytes = vec![0; LEN];
                world.receive(&mut bytes, 0, Tag::default())?;
                assert!(bytes.iter().enumerate().all(|(i, found)| *found == byte(i)));
                println!("{LEN} bytes arrived");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Runs all jobs with this number of ranks.
    fn test(ranks: usize) {
        let (succeeds, said, text) = ended(start(ranks, "cases", &[]));
        assert!(succeeds, "cases on {ranks} ranks:\n{text}");
        assert_eq!(said.lines().filter(|line| line.starts_with("case ")).count(), CASES.len(), "{said}");
        println!("test mpi: {} cases on {ranks} ranks ... ok", CASES.len());

        let (succeeds, _, text) = ended(start(ranks, "leave when done", &[]));
        assert!(succeeds, "a rank that leaves when it is done, of {ranks}:\n{text}");
        println!("test mpi: a rank of {ranks} leaves when it is done ... ok");

        let long: &[_] = &[("GAPLESS_TIMEOUT_SECONDS", "300")];
        let elsewhere: &[_] = &[("RANK", "0"), ("WORLD_SIZE", "9")];
        // Each entry is a job, and the texts that this program and mpirun must print: all of them.
        let failures = [
            ("kill", long, &["rank 1 ", "signal 9"][..]),
            ("panic", long, &["as the test wants it", "gapless: rank 1 panicked"]),
            ("panic of a thread", long, &["as the test wants it", "gapless: rank 1 panicked"]),
            // The notation that mpirun uses for rank 1.
            ("exit", long, &[",1],1]", "Exit code:    7"]),
            ("abort", long, &["gapless: rank 1 ends the job: the disk is full"]),
            ("leave", long, &["gapless: rank 1 dropped its communicator with 1 operation(s) under way"]),
            ("leave in order", long, &["rank 1 dropped its communicator while rank ", "micro-batch 7 from rank 1"]),
            ("hang", long, &["gave up after 1 s waiting for the activations of stage 2, micro-batch 7 from rank 1"]),
            // The list of late ranks may go on after rank 1.
            ("hang in a sum", long, &["gave up after 1 s waiting for all_reduce of 100 elements", "rank(s) [1"]),
            (
                "sizes",
                long,
                &[
                    "gapless: rank 0 failed: ",
                    "micro-batch 4 from rank 1 to rank 0: 8 bytes were sent, 12 are expected",
                ],
            ),
            ("too long", long, &["from rank 1 to rank 0: 16 bytes were sent, 12 are expected"]),
            ("elsewhere", elsewhere, &["but RANK/WORLD_SIZE says rank 0 of 9"]),
        ];
        for (job, environment, expected) in failures {
            let begin = Instant::now();
            let mut child = start(ranks, job, environment);
            if job == "kill" {
                kill(&mut child);
            }
            let (succeeds, _, text) = ended(child);
            assert!(!succeeds, "{job} on {ranks} ranks ends with success:\n{text}");
            for expected in expected {
                assert!(text.contains(expected), "{job} on {ranks} ranks does not say {expected:?}:\n{text}");
            }
            let took = Duration::from_millis(begin.elapsed().as_millis() as u64);
            println!("test mpi: {job} on {ranks} ranks ends the job ({took:?}) ... ok");
        }
    }

    fn start(ranks: usize, job: &str, environment: &[(&str, &str)]) -> Child {
        let mut command = mpirun(ranks);
        command.args(["--bind-to", "none"]).arg(std::env::current_exe().unwrap()).args(["--job", job]);
        command.envs(environment.iter().copied());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("mpirun starts")
    }

    /// Kills the culprit once it has printed its process id.
    fn kill(job: &mut Child) {
        let said = BufReader::new(job.stdout.as_mut().unwrap()).lines();
        let pid = said.map(|line| line.unwrap()).find_map(|line| line.strip_prefix("pid ").map(str::to_owned));
        let pid = pid.expect("the culprit says its process id");
        assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    }

    /// Returns whether the job succeeded, its output and its errors.
    fn ended(mut job: Child) -> (bool, String, String) {
        let mut stderr = job.stderr.take().unwrap();
        let errors = std::thread::spawn(move || {
            let mut text = String::new();
            stderr.read_to_string(&mut text).map(|_| text)
        });
        let mut said = String::new();
        job.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let succeeded = job.wait().unwrap().success();
        (succeeded, said, errors.join().unwrap().unwrap())
    }
}
