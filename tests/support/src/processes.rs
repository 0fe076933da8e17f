//! Programs that start themselves again as the ranks of a world.

use std::process::Command;

/// `mpirun` for so many processes of this host, whatever its cores and whoever starts it; options of its own, the program and its
/// arguments are still to be added.
pub fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.args(["--oversubscribe", "--mca", "btl_tcp_if_include", "lo", "-n", &ranks.to_string()]);
    command
}
