//! A trainer's state on disk: everything that is needed to continue training with the same bits. The mesh of ranks that
//! continues may differ from the mesh that saved.
//!
//! Every tensor is saved by the rank that updates it. If several ranks update copies of a tensor, the first of these
//! ranks saves it. Tensors that are divided among ranks are saved in parts, whose windows are in the manifest. A resuming
//! rank reads the elements that it needs, from any files that contain them. So the files do not depend on the mesh that
//! reads them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::DType;
use gapless_alloc::Role;
use gapless_compile::step::Precision;
use gapless_kernels::cpu::peak::Bf16Products;
use half::bf16;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Trainer;
use super::saved_parts::{SavedParts, described};
use crate::checkpoint::{Checkpoint, CheckpointError, Draft, Section, TensorBytes, WrittenFiles, differences};
use crate::communicator::Communicator;
use crate::error::{Result, TrainError};

/// Number of elements of a moving average that are converted at once.
const AVERAGE_BLOCK: usize = 1 << 16;
const ROLES: [(&str, Role); 2] = [("model", Role::Parameter), ("optimizer", Role::OptimizerState)];

/// The files that a rank has written, or the error because of which it could not write them. This is sent to the rank
/// that commits the checkpoint.
#[derive(Debug, Serialize, Deserialize)]
struct Written {
    files: WrittenFiles,
    /// Description of the window of each tensor part, by file and name.
    parts: Map<String, Value>,
    error: Option<String>,
}

/// Hashes of this rank's copies of parameters, by name.
type Copies = BTreeMap<String, String>;

impl Trainer {
    /// Saves parameters, optimizer states, step and seed in a new folder `dir/step-…`, and returns the path of this
    /// folder. `run` is stored in the manifest. It should contain everything else that the caller needs to continue,
    /// such as the position in the data and the model's configuration.
    ///
    /// With several ranks, all ranks must call this method with the same folder `dir`. The checkpoint becomes valid
    /// once all ranks have written their files.
    ///
    /// # Errors
    /// Returns an error if writing fails on any rank, for example because the disk is full. Earlier checkpoints stay
    /// intact. Returns [`TrainError::CopiesDiffer`] if several ranks have copies of a parameter that are not equal.
    pub fn save(&mut self, dir: &Path, run: Value) -> Result<PathBuf> {
        self.training()?;
        let _span = tracing::info_span!("save", step = self.step).entered();
        let copies = self.copies()?;
        expect_equal_copies(&self.all(copies)?)?;
        let first = self.rank() == 0;
        let draft = Draft::join(dir, self.step);
        let begun = if first { Draft::begin(dir, self.step).err() } else { None };
        first_error(self.all(begun.map(|error| error.to_string()))?)?;
        let written = self.write_own(&draft)?;
        let written = self.all(written)?;
        let failed = written.iter().any(|written| written.error.is_some());
        if first && failed {
            draft.discard();
        }
        first_error(written.iter().map(|written| written.error.clone()).collect())?;
        let committed = if first { Some(self.commit(&draft, written, run)) } else { None };
        let path = committed.transpose().map_err(|error| error.to_string());
        if path.is_err() {
            draft.discard();
        }
        // Send the name of the folder that the first rank has created, or the first rank's error. Only the name is
        // sent, because the path of the parent folder may differ between ranks.
        let name = path.as_ref().ok().and_then(|path| Some(path.as_ref()?.file_name()?.to_string_lossy().into_owned()));
        let (names, errors): (Vec<Option<String>>, _) = self.all((name, path.err()))?.into_iter().unzip();
        first_error(errors)?;
        Ok(dir.join(names.into_iter().flatten().next().expect("the first rank has committed it")))
    }

    /// Continues from a checkpoint: restores parameters, optimizer states, step and seed. The checkpoint may have
    /// been saved by any mesh of ranks. Returns the `run` value that was passed to [`Self::save`].
    ///
    /// # Errors
    /// Returns an error if the checkpoint was saved from another model; this leaves the trainer unchanged. Also returns
    /// an error if a file cannot be read, or has changed since the checkpoint was opened. After such an error, the
    /// trainer holds a mixture of old and new tensors, and must be rebuilt.
    pub fn resume(&mut self, checkpoint: &Checkpoint) -> Result<Value> {
        self.training()?;
        checkpoint.expect("tensors", &self.saved_shapes())?;
        let metadata = checkpoint.metadata();
        for kind in ROLES {
            self.fill_from(checkpoint, kind)?;
        }
        if let (Some(saved), Some(now)) = (metadata["bf16_products"].as_str(), self.bf16_products())
            && saved != now
        {
            tracing::warn!(
                saved,
                now,
                "products of bf16 are computed in another way than before this checkpoint: results differ in the last bits; \
                 GAPLESS_BF16_PRODUCTS names the way, if this processor has it"
            );
        }
        self.step = checkpoint.step();
        self.options.seed = metadata["seed"].as_u64().unwrap_or(self.options.seed);
        Ok(metadata["run"].clone())
    }

    /// Loads only the parameters of a checkpoint, for a model built with
    /// [`for_inference`](super::TrainerBuilder::for_inference).
    ///
    /// # Errors
    /// Returns the errors of [`Self::resume`] that concern parameters.
    pub fn load(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let expected = self.session.executable().specs(Role::Parameter);
        let expected: Map<String, Value> = expected.map(|(name, spec)| (name.to_owned(), json!(spec.dims()))).collect();
        let mut saved = checkpoint.metadata()["tensors"].clone();
        if let Some(saved) = saved.as_object_mut() {
            saved.retain(|name, _| expected.contains_key(name));
        }
        let differences = differences(&saved, &Value::Object(expected));
        if !differences.is_empty() {
            let (path, key) = (checkpoint.path().to_owned(), "tensors".to_owned());
            return Err(CheckpointError::Other { path, key, differences, config: None }.into());
        }
        self.fill_from(checkpoint, ROLES[0])
    }

    /// Like [`Self::load`], but for each parameter that has a moving average
    /// ([`UpdateOptions::average`](gapless_compile::step::UpdateOptions::average)), loads the average instead of the
    /// parameter.
    ///
    /// # Errors
    /// Returns the errors of [`Self::load`], and an error if the checkpoint contains no averages.
    pub fn load_average(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.load(checkpoint)?;
        let [_, (optimizer, _)] = ROLES;
        let saved = SavedParts::of(checkpoint, optimizer);
        let own = self.session.executable().specs(Role::Parameter);
        let own: Vec<(String, DType)> = own.map(|(name, spec)| (name.to_owned(), spec.dtype)).collect();
        let mut block = vec![0; AVERAGE_BLOCK * DType::F32.size_in_bytes()];
        let mut found = false;
        for (name, dtype) in own {
            let average = format!("average/{name}");
            // Frozen parameters have no average.
            if !saved.contains(&average) {
                continue;
            }
            let window = self.window(&name)?;
            let size = DType::F32.size_in_bytes();
            self.session.fill_tensor(&name, |bytes| {
                saved.read(&average, DType::F32, &window, &mut |reader, from, to| {
                    for first in to.clone().step_by(AVERAGE_BLOCK) {
                        let count = AVERAGE_BLOCK.min(to.end - first);
                        let block = &mut block[..count * size];
                        reader.read_into((from + first - to.start) * size, block)?;
                        let averages = block.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
                        match dtype {
                            DType::BF16 => {
                                write(&mut bytes[2 * first..], averages.map(|x| bf16::from_f32(x).to_ne_bytes()))
                            }
                            _ => write(&mut bytes[4 * first..], averages.map(f32::to_ne_bytes)),
                        }
                    }
                    Ok(())
                })
            })??;
            found = true;
        }
        match found {
            true => Ok(()),
            false => {
                let (path, name) = (checkpoint.path().to_owned(), "average/…".to_owned());
                Err(CheckpointError::NoTensor { path, name }.into())
            }
        }
    }

    /// Reads all of this rank's tensors of a role from the checkpoint.
    fn fill_from(&mut self, checkpoint: &Checkpoint, (kind, role): (&str, Role)) -> Result<()> {
        let saved = SavedParts::of(checkpoint, kind);
        let own: Vec<(String, DType)> =
            self.session.executable().specs(role).map(|(name, spec)| (name.to_owned(), spec.dtype)).collect();
        for (name, dtype) in own {
            let window = self.window(&name)?;
            self.session.fill_tensor(&name, |bytes| saved.fill(&name, dtype, &window, bytes))??;
        }
        Ok(())
    }

    /// Returns the hashes of the parameters of which other ranks may have copies. The keys contain the name and, if
    /// this rank has only a part, its window.
    fn copies(&self) -> Result<Copies> {
        if self.world.is_none() {
            return Ok(Copies::new());
        }
        Ok(self.session.with_persistent(|tensors| {
            let parameters = tensors.iter().filter(|t| t.label.role == Role::Parameter && t.changes_here);
            let key = |name: &str| match self.layout.parts.get(name) {
                Some(part) => format!("{name} at {}", part.window),
                None => name.to_owned(),
            };
            parameters.map(|t| (key(&t.label.tensor), blake3::hash(t.bytes).to_hex().to_string())).collect()
        })?)
    }

    /// Writes the tensors that this rank has to save.
    fn write_own(&self, draft: &Draft) -> Result<Written> {
        let mesh = &self.options.step.mesh;
        let suffix = match mesh.ranks()? {
            1 => String::new(),
            ranks => format!("-{:05}-of-{ranks:05}", mesh.rank(self.at)),
        };
        let files = ROLES.map(|(kind, _)| format!("{kind}{suffix}.safetensors"));
        let mut parts = Map::new();
        let written = self.session.with_persistent(|tensors| {
            let mut sections = Vec::new();
            for (file, (_, role)) in files.iter().zip(ROLES) {
                let part_of = |name: &str| self.layout.parts.get(name);
                // Copies are equal, so only the first of the ranks with copies writes. Frozen parameters are updated on
                // no stage, so every stage that has such a parameter writes it.
                let frozen =
                    |name: &str| self.layout.frozen.contains_key(name) || !self.layout.shapes.contains_key(name);
                let mine = |t: &&gapless_runtime::PersistentBytes<'_>| {
                    let name = &t.label.tensor;
                    let first = self.layout.is_first_copy(name, *mesh, self.at);
                    t.label.role == role && first && (t.changes_here || frozen(name))
                };
                let mine: Vec<TensorBytes<'_>> = tensors
                    .iter()
                    .filter(mine)
                    .map(|t| TensorBytes {
                        name: &t.label.tensor,
                        dtype: t.spec.dtype,
                        shape: t.spec.dims(),
                        bytes: t.bytes,
                    })
                    .collect();
                let windows =
                    mine.iter().filter_map(|t| Some((t.name.to_owned(), described(&part_of(t.name)?.window))));
                let windows: Map<String, Value> = windows.collect();
                if !windows.is_empty() {
                    parts.insert(file.clone(), Value::Object(windows));
                }
                if !mine.is_empty() || suffix.is_empty() {
                    sections.push(Section { file, tensors: mine });
                }
            }
            draft.write(&sections)
        })?;
        Ok(match written {
            Ok(files) => Written { files, parts, error: None },
            Err(error) => Written { files: WrittenFiles::default(), parts, error: Some(error.to_string()) },
        })
    }

    /// Returns the name of the method by which the CPU multiplies bf16 matrices. Returns `None` if the step has no such
    /// products or does not run on the CPU.
    fn bf16_products(&self) -> Option<&'static str> {
        let has_some = self.options.step.precision != Precision::F32 && !self.device.is_gpu;
        has_some.then(|| Bf16Products::chosen().name())
    }

    fn commit(&self, draft: &Draft, written: Vec<Written>, run: Value) -> Result<PathBuf, CheckpointError> {
        let (mut files, mut parts) = (WrittenFiles::default(), Map::new());
        for one in written {
            files.extend(one.files);
            parts.extend(one.parts);
        }
        let mesh = &self.options.step.mesh;
        let metadata = json!({
            "tensors": self.saved_shapes(),
            "parts": parts,
            "mesh": mesh,
            "seed": self.options.seed,
            "engine": env!("CARGO_PKG_VERSION"),
            "bf16_products": self.bf16_products(),
            "run": run,
        });
        draft.commit(files, metadata)
    }

    /// Returns the index of this rank among all ranks; 0 for a trainer with one rank.
    pub fn rank(&self) -> usize {
        self.world.as_ref().map_or(0, |world| world.rank())
    }

    /// Returns true if `mine` is true on at least one rank. With several ranks, all ranks must call this method.
    ///
    /// # Errors
    /// Returns an error if another rank fails.
    pub fn any(&mut self, mine: bool) -> Result<bool> {
        let Some(world) = &mut self.world else { return Ok(mine) };
        let mut all = vec![0; world.size()];
        world.all_gather(&[u8::from(mine)], &mut all)?;
        Ok(all.contains(&1))
    }

    /// Returns the values of all ranks, in rank order.
    fn all<T: Serialize + for<'a> Deserialize<'a>>(&mut self, mine: T) -> Result<Vec<T>> {
        match &mut self.world {
            Some(world) => exchange(world.as_mut(), &mine),
            None => Ok(vec![mine]),
        }
    }

    /// Returns the names and shapes of all tensors in a checkpoint, which identify the model.
    fn saved_shapes(&self) -> Value {
        let mut shapes: Map<String, Value> =
            self.layout.shapes.iter().map(|(name, shape)| (name.clone(), json!(shape))).collect();
        for (_, role) in ROLES {
            for (name, spec) in
                self.session.executable().specs(role).filter(|(name, _)| !self.layout.parts.contains_key(*name))
            {
                shapes.insert(name.to_owned(), json!(spec.dims()));
            }
        }
        Value::Object(shapes)
    }
}

/// Writes elements to the start of `bytes`.
fn write<const N: usize>(bytes: &mut [u8], elements: impl Iterator<Item = [u8; N]>) {
    bytes.as_chunks_mut().0.iter_mut().zip(elements).for_each(|(to, element)| *to = element);
}

/// Returns an error if the ranks' copies of a parameter have different hashes. All ranks get the same result.
fn expect_equal_copies(all: &[Copies]) -> Result<()> {
    let mut firsts: BTreeMap<&str, (usize, &str)> = BTreeMap::new();
    for (rank, copies) in all.iter().enumerate() {
        for (name, hash) in copies {
            let &mut (first, expected) = firsts.entry(name).or_insert((rank, hash));
            if expected != hash {
                return Err(TrainError::CopiesDiffer { name: name.clone(), first, rank });
            }
        }
    }
    Ok(())
}

/// Returns the error of the first rank that has one, or `Ok` if no rank has.
fn first_error(errors: Vec<Option<String>>) -> Result<()> {
    match errors.into_iter().enumerate().find_map(|(rank, error)| Some((rank, error?))) {
        None => Ok(()),
        Some((rank, why)) => Err(TrainError::NotSaved { rank, why }),
    }
}

/// Exchanges one value per rank as JSON: first the lengths of all texts, then the texts, padded to the longest.
fn exchange<T: Serialize + for<'a> Deserialize<'a>>(world: &mut dyn Communicator, mine: &T) -> Result<Vec<T>> {
    let mut text = serde_json::to_vec(mine).expect("strings and numbers make valid JSON");
    let mut sizes = vec![0; 8 * world.size()];
    world.all_gather(&(text.len() as u64).to_le_bytes(), &mut sizes)?;
    let size = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes")) as usize;
    let sizes: Vec<usize> = sizes.chunks_exact(8).map(size).collect();
    let longest = sizes.iter().copied().max().unwrap_or(0);
    text.resize(longest, 0);
    let mut texts = vec![0; longest * sizes.len()];
    world.all_gather(&text, &mut texts)?;
    let read = |(text, &size): (&[u8], &usize)| {
        serde_json::from_slice(&text[..size]).map_err(|error| TrainError::NotSaved { rank: 0, why: error.to_string() })
    };
    texts.chunks_exact(longest.max(1)).zip(&sizes).map(read).collect()
}
