//! Detects the MPI launcher and builds its command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Job, LauncherError};

/// Implementation of an MPI launcher.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flavor {
    /// Open MPI's `mpirun`, 3 to 5.
    OpenMpi,
    /// Hydra, the launcher of MPICH and its derivatives (Intel MPI, MVAPICH).
    Hydra,
}

/// An MPI launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mpirun {
    /// Path of the program.
    pub path: PathBuf,
    /// Implementation.
    pub flavor: Flavor,
}

impl Mpirun {
    /// Returns the launcher at `path`, or the first of `mpirun` and `mpiexec` that is found.
    ///
    /// # Errors
    ///
    /// [`LauncherError::NoMpirun`], [`LauncherError::Unknown`].
    pub fn find(path: Option<&Path>) -> Result<Self, LauncherError> {
        let candidates: Vec<PathBuf> = match path {
            Some(path) => vec![path.to_path_buf()],
            None => ["mpirun", "mpiexec"].map(PathBuf::from).to_vec(),
        };
        for candidate in &candidates {
            let Ok(output) = Command::new(candidate).arg("--version").output() else { continue };
            let text = String::from_utf8_lossy(&output.stdout);
            return match flavor(&text) {
                Some(flavor) => Ok(Self { path: candidate.clone(), flavor }),
                None => Err(LauncherError::Unknown {
                    path: candidate.clone(),
                    says: text.lines().next().unwrap_or_default().to_string(),
                }),
            };
        }
        let names: Vec<String> = candidates.iter().map(|path| path.display().to_string()).collect();
        Err(LauncherError::NoMpirun { looked_for: names.join(", ") })
    }
}

/// Detects the implementation by its version text.
fn flavor(version: &str) -> Option<Flavor> {
    if version.contains("Open MPI") || version.contains("OpenRTE") || version.contains("PRRTE") {
        Some(Flavor::OpenMpi)
    } else if version.contains("HYDRA") || version.contains("Intel(R) MPI") {
        Some(Flavor::Hydra)
    } else {
        None
    }
}

impl Job {
    /// Returns the launcher's command line, program first. `root` allows Open MPI to run as the superuser.
    pub fn command(&self, mpirun: &Mpirun, root: bool) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec![mpirun.path.clone().into(), "-n".into(), self.ranks.to_string().into()];
        let mut add = |more: &[&str]| words.extend(more.iter().map(OsString::from));
        let most = self.hosts.iter().map(|(_, ranks)| *ranks).max().unwrap_or(self.ranks);
        let cores = self.cores.map(|cores| cores / most);
        let hosts: Vec<String> = self.hosts.iter().map(|(name, ranks)| format!("{name}:{ranks}")).collect();
        let hosts = hosts.join(",");
        match mpirun.flavor {
            Flavor::OpenMpi => {
                if root {
                    add(&["--allow-run-as-root"]);
                }
                if !hosts.is_empty() {
                    add(&["--host", &hosts]);
                }
                match cores {
                    // Fewer cores than ranks, or an unknown number: ranks share them.
                    Some(0) => add(&["--oversubscribe", "--bind-to", "none"]),
                    None => add(&["--bind-to", "none"]),
                    Some(each) => add(&["--map-by", &format!("slot:PE={each}"), "--bind-to", "core"]),
                }
                self.variables.iter().for_each(|(name, value)| add(&["-x", &format!("{name}={value}")]));
            }
            Flavor::Hydra => {
                if !hosts.is_empty() {
                    add(&["-hosts", &hosts]);
                }
                match cores {
                    Some(0) | None => add(&["-bind-to", "none"]),
                    Some(each) => add(&["-bind-to", &format!("core:{each}")]),
                }
                self.variables.iter().for_each(|(name, value)| add(&["-genv", name, value]));
            }
        }
        words.extend(self.options.iter().map(OsString::from));
        words.extend(self.program.iter().cloned());
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(ranks: usize, hosts: &[(&str, usize)], cores: Option<usize>) -> Job {
        Job {
            ranks,
            hosts: hosts.iter().map(|(name, ranks)| (name.to_string(), *ranks)).collect(),
            cores,
            variables: vec![("ZERO_RESTARTS".into(), "1".into())],
            options: vec!["--tag-output".into()],
            program: vec!["zero".into(), "train".into()],
        }
    }

    fn line(job: &Job, flavor: Flavor, root: bool) -> String {
        let mpirun = Mpirun { path: "mpirun".into(), flavor };
        job.command(&mpirun, root).iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_launcher_gets_its_own_words() {
        let two = job(4, &[("a", 2), ("b", 2)], Some(8));
        insta::assert_snapshot!(line(&two, Flavor::OpenMpi, false), @"mpirun -n 4 --host a:2,b:2 --map-by slot:PE=4 --bind-to core -x ZERO_RESTARTS=1 --tag-output zero train");
        insta::assert_snapshot!(line(&two, Flavor::Hydra, true), @"mpirun -n 4 -hosts a:2,b:2 -bind-to core:4 -genv ZERO_RESTARTS 1 --tag-output zero train");
    }

    #[test]
    fn ranks_share_cores_that_are_too_few() {
        insta::assert_snapshot!(line(&job(4, &[], Some(2)), Flavor::OpenMpi, true), @"mpirun -n 4 --allow-run-as-root --oversubscribe --bind-to none -x ZERO_RESTARTS=1 --tag-output zero train");
        insta::assert_snapshot!(line(&job(2, &[], None), Flavor::Hydra, true), @"mpirun -n 2 -bind-to none -genv ZERO_RESTARTS 1 --tag-output zero train");
    }

    #[test]
    fn launchers_are_told_by_their_version() {
        assert_eq!(flavor("mpirun (Open MPI) 4.1.4\n"), Some(Flavor::OpenMpi));
        assert_eq!(flavor("HYDRA build details:\n    Version: 4.0.2\n"), Some(Flavor::Hydra));
        assert_eq!(flavor("something else"), None);
        let missing = Mpirun::find(Some(Path::new("/nowhere/mpirun"))).unwrap_err();
        assert!(missing.to_string().contains("apt-get install openmpi-bin"), "{missing}");
    }
}
