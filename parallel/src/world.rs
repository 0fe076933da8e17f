//! Finds out which rank this process is, from the environment variables that its launcher sets.

use std::fmt;

/// A process's place among all processes of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// Index of this process, from 0.
    pub rank: usize,
    /// Number of processes.
    pub size: usize,
    /// Index of this process among the processes of its host, from 0. The index selects the process's device. `None` if
    /// the launcher doesn't set the index.
    pub local_rank: Option<usize>,
    /// The launcher whose variables were used.
    pub launcher: Launcher,
}

/// The launchers whose variables are recognized. Earlier ones take precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    /// `RANK`, `WORLD_SIZE`, `LOCAL_RANK`: torchrun, or the user.
    Torch,
    /// `OMPI_COMM_WORLD_*`: OpenMPI's mpirun.
    OpenMpi,
    /// `PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`: MPICH, Intel MPI and others.
    Pmi,
    /// `SLURM_*`: srun.
    Slurm,
}

/// Errors in the variables that give a process's place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum WorldError {
    #[error("{variable}={value:?} is not a number")]
    NotANumber { variable: &'static str, value: String },
    #[error("{set} is set, but {missing} is not; set both, or neither")]
    Incomplete { set: &'static str, missing: &'static str },
    #[error("{rank_variable}={rank} is not below {size_variable}={size}")]
    OutOfRange { rank_variable: &'static str, rank: usize, size_variable: &'static str, size: usize },
    #[error(
        "MPI says that this is rank {mpi_rank} of {mpi_size}, but {launcher} says rank {rank} of {size}; \
         start the program through mpirun (or srun with MPI support) alone, with none of the other's variables set"
    )]
    Disagreement { mpi_rank: usize, mpi_size: usize, launcher: Launcher, rank: usize, size: usize },
}

/// The variables of each launcher: the rank, the size, and the rank on the host. Of several variables for the size, the
/// first that is set counts.
const VARIABLES: [(Launcher, &str, &[&str], &str); 4] = [
    (Launcher::Torch, "RANK", &["WORLD_SIZE"], "LOCAL_RANK"),
    (Launcher::OpenMpi, "OMPI_COMM_WORLD_RANK", &["OMPI_COMM_WORLD_SIZE"], "OMPI_COMM_WORLD_LOCAL_RANK"),
    (Launcher::Pmi, "PMI_RANK", &["PMI_SIZE"], "MPI_LOCALRANKID"),
    // A job step may have fewer tasks than the job.
    (Launcher::Slurm, "SLURM_PROCID", &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"], "SLURM_LOCALID"),
];

impl World {
    /// Returns the place that the environment gives this process, or `None` if no launcher's variables are set. With
    /// `None`, the process is the only one.
    ///
    /// # Errors
    /// Returns an error if a launcher's variables are incomplete, are not numbers, or contradict each other.
    pub fn discover() -> Result<Option<Self>, WorldError> {
        Self::discover_in(|variable| std::env::var_os(variable).map(|value| value.to_string_lossy().into_owned()))
    }

    /// Like [`World::discover`], with variables looked up by `get`.
    pub fn discover_in(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, WorldError> {
        let number = |variable: &'static str| match get(variable) {
            None => Ok(None),
            Some(value) => match value.trim().parse::<usize>() {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(WorldError::NotANumber { variable, value }),
            },
        };
        for (launcher, rank_variable, size_variables, local_variable) in VARIABLES {
            let size_variable = size_variables.iter().copied().find(|variable| get(variable).is_some());
            let (rank, size) = match (number(rank_variable)?, size_variable) {
                (None, None) => continue,
                (Some(_), None) => {
                    return Err(WorldError::Incomplete { set: rank_variable, missing: size_variables[0] });
                }
                // Slurm sets the number of tasks as soon as it allocates nodes, before any task is started. So the size
                // alone means nothing.
                (None, Some(_)) if launcher == Launcher::Slurm => continue,
                (None, Some(set)) => return Err(WorldError::Incomplete { set, missing: rank_variable }),
                (Some(rank), Some(size_variable)) => match number(size_variable)? {
                    Some(size) if rank < size => (rank, size),
                    size => {
                        let size = size.unwrap_or(0);
                        return Err(WorldError::OutOfRange { rank_variable, rank, size_variable, size });
                    }
                },
            };
            return Ok(Some(Self { rank, size, local_rank: number(local_variable)?, launcher }));
        }
        Ok(None)
    }

    /// Compares this place with the one that MPI reports.
    ///
    /// # Errors
    /// Returns an error if the two differ. The variables were then set by another launcher than the one that started
    /// the processes, and two processes could do the same rank's work.
    pub fn agree_with_mpi(&self, mpi_rank: usize, mpi_size: usize) -> Result<(), WorldError> {
        let Self { rank, size, launcher, .. } = *self;
        if (rank, size) == (mpi_rank, mpi_size) {
            return Ok(());
        }
        Err(WorldError::Disagreement { mpi_rank, mpi_size, launcher, rank, size })
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (_, rank, sizes, _) = VARIABLES[*self as usize];
        write!(f, "{rank}/{}", sizes[0])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs [`World::discover_in`] with `environment`, which consists of `NAME=value` words.
    fn discover(environment: &str) -> Result<Option<World>, WorldError> {
        let pairs: Vec<(&str, &str)> = environment.split_whitespace().map(|w| w.split_once('=').unwrap()).collect();
        World::discover_in(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn places_are_found() {
        use Launcher::{OpenMpi, Pmi, Slurm, Torch};
        let openmpi = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1";
        for (environment, expected) in [
            ("", None),
            ("HOME=/root", None),
            ("RANK=3 WORLD_SIZE=8 LOCAL_RANK=1", Some((3, 8, Some(1), Torch))),
            ("RANK=0 WORLD_SIZE=1", Some((0, 1, None, Torch))),
            (openmpi, Some((1, 4, Some(1), OpenMpi))),
            (&format!("{openmpi} RANK=2 WORLD_SIZE=3"), Some((2, 3, None, Torch))),
            (&format!("{openmpi} SLURM_PROCID=0 SLURM_NTASKS=1"), Some((1, 4, Some(1), OpenMpi))),
            ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=0", Some((1, 2, Some(0), Pmi))),
            ("SLURM_PROCID=5 SLURM_NTASKS=16 SLURM_LOCALID=1", Some((5, 16, Some(1), Slurm))),
            ("SLURM_PROCID=1 SLURM_NTASKS=16 SLURM_STEP_NUM_TASKS=2", Some((1, 2, None, Slurm))),
            ("SLURM_NTASKS=16", None),
        ] {
            let expected =
                expected.map(|(rank, size, local_rank, launcher)| World { rank, size, local_rank, launcher });
            assert_eq!(discover(environment), Ok(expected), "{environment}");
        }
    }

    #[test]
    fn contradictory_variables_are_refused() {
        for (environment, expected) in [
            ("RANK=3", "RANK is set, but WORLD_SIZE is not"),
            ("WORLD_SIZE=3", "WORLD_SIZE is set, but RANK is not"),
            ("RANK=x WORLD_SIZE=3", "RANK=\"x\" is not a number"),
            ("RANK=-1 WORLD_SIZE=3", "RANK=\"-1\" is not a number"),
            ("RANK=3 WORLD_SIZE=3", "RANK=3 is not below WORLD_SIZE=3"),
            ("RANK=0 WORLD_SIZE=0", "RANK=0 is not below WORLD_SIZE=0"),
            ("RANK=0 WORLD_SIZE=1 LOCAL_RANK=a", "LOCAL_RANK=\"a\" is not a number"),
            ("OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not"),
            ("SLURM_PROCID=4 SLURM_NTASKS=2", "SLURM_PROCID=4 is not below SLURM_NTASKS=2"),
        ] {
            let error = discover(environment).expect_err(environment).to_string();
            assert!(error.contains(expected), "{environment}: {error}");
        }
    }

    #[test]
    fn mpi_is_trusted() {
        let world = discover("RANK=1 WORLD_SIZE=2").unwrap().unwrap();
        assert_eq!(world.agree_with_mpi(1, 2), Ok(()));
        for (rank, size) in [(0, 2), (1, 4), (0, 1)] {
            let error = world.agree_with_mpi(rank, size).unwrap_err().to_string();
            assert!(error.contains(&format!("rank {rank} of {size}, but RANK/WORLD_SIZE says rank 1 of 2")), "{error}");
        }
    }
}
