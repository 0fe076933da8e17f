//! Programs that start themselves again, as the ranks of a world.

use std::process::Command;

/// Returns an `mpirun` command for `ranks` processes on this host. The command works for any number of cores and for
/// any user. The caller adds further options, the program and the program's arguments.
pub fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
    command.args(["--oversubscribe", "--mca", "btl_tcp_if_include", "lo", "-n", &ranks.to_string()]);
    command
}
