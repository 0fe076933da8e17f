//! Tests of faults. Any damage to a checkpoint's bytes is detected, and an interrupted save leaves the previous
//! checkpoint intact.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use candle_core::DType;
use gapless_testing::prelude::*;
use serde_json::json;

use super::*;
use crate::disk::{Disk, RealDisk};
use crate::manifest::{MANIFEST, MANIFEST_HASH, hash_line};
use crate::save::save_on;

/// Two sections whose contents depend on `salt`.
fn with_sections<R>(salt: u8, run: impl FnOnce(&[Section<'_>]) -> R) -> R {
    let weight: Vec<u8> = (0..96).map(|index| index ^ salt).collect();
    let moment = [salt; 32];
    run(&[
        Section {
            file: "model.safetensors",
            tensors: vec![
                TensorBytes { name: "wte.weight", dtype: DType::F32, shape: &[4, 6], bytes: &weight },
                TensorBytes { name: "steps", dtype: DType::U8, shape: &[1], bytes: &[salt] },
            ],
        },
        Section {
            file: "optimizer.safetensors",
            tensors: vec![TensorBytes { name: "wte.weight.m", dtype: DType::BF16, shape: &[16], bytes: &moment }],
        },
    ])
}

fn save(disk: &mut impl Disk, dir: &Path, step: u64, salt: u8) -> Result<PathBuf, CheckpointError> {
    with_sections(salt, |sections| save_on(disk, dir, step, sections, json!({ "salt": salt })))
}

/// Returns the salt of a checkpoint. It is read from the metadata and compared with a tensor.
fn salt_of(checkpoint: &Checkpoint) -> u8 {
    let mut salt = [0];
    checkpoint.section("model.safetensors").unwrap().read_into("steps", &mut salt).unwrap();
    assert_eq!(checkpoint.metadata(), &json!({ "salt": salt[0] }));
    salt[0]
}

fn latest(dir: &Path) -> Option<(u64, u8)> {
    Checkpoint::latest(dir).unwrap().map(|checkpoint| (checkpoint.step(), salt_of(&checkpoint)))
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A disk on which one operation fails, or on which writes fail after a number of bytes. After a crash, every operation
/// fails.
struct FailingDisk {
    acts_left: usize,
    bytes_left: usize,
    crashes: bool,
    failed: bool,
}

impl FailingDisk {
    fn act(&mut self) -> io::Result<RealDisk> {
        if self.acts_left == 0 && (self.crashes || !self.failed) {
            self.failed = true;
            return Err(io::ErrorKind::Other.into());
        }
        self.acts_left = self.acts_left.saturating_sub(1);
        Ok(RealDisk)
    }
}

impl Disk for FailingDisk {
    fn create_folder(&mut self, path: &Path) -> io::Result<()> {
        self.act()?.create_folder(path)
    }
    fn create(&mut self, path: &Path) -> io::Result<File> {
        self.act()?.create(path)
    }
    fn write(&mut self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        let fitting = bytes.len().min(self.bytes_left);
        self.bytes_left -= fitting;
        file.write_all(&bytes[..fitting])?;
        if fitting < bytes.len() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.act().map(drop)
    }
    fn sync(&mut self, file: &File) -> io::Result<()> {
        self.act()?.sync(file)
    }
    fn sync_folder(&mut self, path: &Path) -> io::Result<()> {
        self.act()?.sync_folder(path)
    }
    fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        self.act()?.rename(from, to)
    }
    fn remove_folder(&mut self, path: &Path) -> io::Result<()> {
        self.act()?.remove_folder(path)
    }
}

#[test]
fn a_failure_or_a_crash_at_any_act_leaves_a_sound_checkpoint() {
    for crashes in [false, true] {
        for (step, salt) in [(200, 2), (100, 2)] {
            let mut seen = Vec::new();
            for acts_left in 0.. {
                let folder = tempfile::tempdir().unwrap();
                let dir = folder.path().join("runs");
                save(&mut RealDisk, &dir, 100, 1).unwrap();
                let mut disk = FailingDisk { acts_left, bytes_left: usize::MAX, crashes, failed: false };
                let saved = save(&mut disk, &dir, step, salt);

                let found = latest(&dir).expect("one was saved before");
                assert!([(100, 1), (step, salt)].contains(&found), "after {acts_left} acts: {found:?}");
                assert!(saved.is_err() || found == (step, salt), "a save that says it is done is done");
                if !crashes && found == (100, 1) {
                    assert_eq!(names(&dir), ["step-00000100"], "after {acts_left} acts");
                }
                seen.push(found);

                // The next run saves the same step and removes the remains.
                save(&mut RealDisk, &dir, step, 3).unwrap();
                Checkpoint::prune(&dir, 1, &[]).unwrap();
                assert_eq!((latest(&dir), names(&dir)), (Some((step, 3)), vec![format!("step-{step:08}")]));
                if !disk.failed {
                    break;
                }
            }
            assert!(seen.len() > 15 && seen[0] == (100, 1) && *seen.last().unwrap() == (step, salt), "{seen:?}");
        }
    }
}

#[test]
fn a_full_disk_is_an_error_and_the_last_checkpoint_stays() {
    let folder = tempfile::tempdir().unwrap();
    save(&mut RealDisk, folder.path(), 100, 1).unwrap();
    let mut fulls = 0;
    for bytes_left in (0..).step_by(37) {
        let mut disk = FailingDisk { acts_left: usize::MAX, bytes_left, crashes: false, failed: false };
        match save(&mut disk, folder.path(), 200, 2) {
            Ok(_) => break,
            Err(error) => assert!(error.to_string().contains("check that the disk has room"), "{error}"),
        }
        assert_eq!((latest(folder.path()), names(folder.path())), (Some((100, 1)), vec!["step-00000100".into()]));
        fulls += 1;
    }
    assert!(fulls > 10);
    assert_eq!(latest(folder.path()), Some((200, 2)));
}

#[test]
fn every_truncation_flip_and_loss_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&mut RealDisk, folder.path(), 100, 1).unwrap();
    let files = ["model.safetensors", "optimizer.safetensors", MANIFEST, MANIFEST_HASH];
    assert_eq!(names(&path), [MANIFEST_HASH, MANIFEST, "model.safetensors", "optimizer.safetensors"]);
    for name in files {
        let file = path.join(name);
        let whole = fs::read(&file).unwrap();
        let refused = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            Checkpoint::open(&path).expect_err("damage is seen").to_string()
        };
        for sixteenth in 0..16 {
            let error = refused(&whole[..whole.len() * sixteenth / 16]);
            let expected = if name.ends_with("safetensors") { "it is cut off" } else { "is damaged" };
            assert!(error.contains(expected), "{error}");
        }
        assert!(refused(&[&whole, &b"x"[..]].concat()).contains("use an older checkpoint"));
        for index in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[index] ^= 1 << (index % 8);
            assert!(refused(&flipped).contains("is damaged"), "byte {index} of {name}");
        }
        fs::remove_file(&file).unwrap();
        let error = Checkpoint::open(&path).unwrap_err();
        match name {
            MANIFEST => assert!(matches!(error, CheckpointError::Interrupted { .. }), "{error}"),
            _ => assert!(matches!(error, CheckpointError::MissingFile { .. }), "{error}"),
        }
        fs::write(&file, &whole).unwrap();
    }
    assert_eq!(salt_of(&Checkpoint::open(&path).unwrap()), 1);
}

#[test]
fn latest_passes_over_what_is_not_sound() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    assert_eq!(latest(&dir.join("never")), None);
    for step in [9, 10, 100_000_000] {
        save(&mut RealDisk, dir, step, step as u8).unwrap();
    }
    fs::create_dir(dir.join("step-00000900.partial")).unwrap();
    fs::create_dir(dir.join("step-of-another-kind")).unwrap();
    assert_eq!(latest(dir), Some((100_000_000, 0)));
    fs::write(dir.join("step-100000000/model.safetensors"), "").unwrap();
    assert_eq!(latest(dir), Some((10, 10)));

    let removed = Checkpoint::prune(dir, 1, &[]).unwrap();
    assert_eq!(removed, [dir.join("step-00000009"), dir.join("step-00000900.partial")]);
    fs::remove_file(dir.join("step-00000010").join(MANIFEST)).unwrap();
    let error = Checkpoint::latest(dir).unwrap_err();
    assert!(matches!(error, CheckpointError::NoneSound { count: 2, .. }), "{error}");
    assert!(error.to_string().contains("is cut off"), "{error}");
}

#[test]
fn what_is_loaded_is_what_was_verified() {
    // The tensor is larger than a chunk, so that parts of the tensor begin and end within chunks.
    let weight: Vec<u8> = (0..2_500_000u32).map(|index| (index % 251) as u8).collect();
    let folder = tempfile::tempdir().unwrap();
    let tensor = TensorBytes { name: "w", dtype: DType::U8, shape: &[2_500_000], bytes: &weight };
    let section = Section { file: "model.safetensors", tensors: vec![tensor] };
    let path = Checkpoint::save(folder.path(), 1, &[section], json!({})).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let section = checkpoint.section("model.safetensors").unwrap();
    // One reader reads all ranges, and each range is read by a reader of its own.
    let mut reader = section.reader("w").unwrap();
    for (start, length) in [(0, 2_500_000), (0, 1), (1_048_000, 1000), (7, 2_400_000), (2_499_999, 1), (5, 0)] {
        let mut part = vec![0; length];
        section.read_part_into("w", start, &mut part).unwrap();
        assert!(part == weight[start..start + length], "{length} bytes from {start} on");
        part.fill(0);
        reader.read_into(start, &mut part).unwrap();
        assert!(part == weight[start..start + length], "{length} bytes from {start} on");
    }
    let check = |change: &dyn Fn(&mut Vec<u8>), part: std::ops::Range<usize>, words: Option<&str>| {
        let file = path.join("model.safetensors");
        let whole = fs::read(&file).unwrap();
        let mut changed = whole.clone();
        change(&mut changed);
        fs::write(&file, changed).unwrap();
        let read = section.read_part_into("w", part.start, &mut vec![0; part.len()]);
        fs::write(&file, whole).unwrap();
        let error = read.err().map(|error| error.to_string());
        match (&error, words) {
            (Some(error), Some(words)) => {
                assert!(error.contains(words) && error.contains("model.safetensors"), "{error}")
            }
            (error, words) => assert_eq!((error, words), (&None, None)),
        }
    };
    check(&|bytes| bytes[2_000_000] ^= 1, 0..2_500_000, Some("it has changed since it was opened"));
    check(&|bytes| bytes[2_000_000] ^= 1, 1_999_000..1_999_001, Some("it has changed since it was opened"));
    check(&|bytes| bytes[2_000_000] ^= 1, 0..1000, None);
    check(&|bytes| bytes.truncate(1_500_000), 0..2_500_000, Some("it was cut off while it was read"));
    check(&|bytes| bytes.push(0), 0..2_500_000, None);
}

#[test]
fn the_step_is_the_manifests() {
    let folder = tempfile::tempdir().unwrap();
    let (dir, other) = (folder.path(), tempfile::tempdir().unwrap());
    save(&mut RealDisk, other.path(), 20, 2).unwrap();
    fs::rename(other.path().join("step-00000020"), dir.join("step-00000999")).unwrap();
    assert_eq!(latest(dir), Some((20, 2)));
    save(&mut RealDisk, dir, 40, 4).unwrap();
    assert_eq!(latest(dir), Some((40, 4)), "progress is not hidden by a name");

    // A renamed folder is neither removed nor replaced. A new checkpoint of the step in its name gets another name and
    // is found.
    assert!(Checkpoint::prune(dir, 1, &[]).unwrap().is_empty());
    let path = save(&mut RealDisk, dir, 999, 9).unwrap();
    assert_eq!(path, dir.join("step-00000999-2"));
    assert_eq!(latest(dir), Some((999, 9)));
    assert_eq!(save(&mut RealDisk, dir, 999, 10).unwrap(), path, "the same step replaces its own");
    assert_eq!(latest(dir), Some((999, 10)));
    assert_eq!(Checkpoint::prune(dir, 1, &[]).unwrap(), [dir.join("step-00000040")]);
    assert_eq!(names(dir), ["step-00000999", "step-00000999-2"]);

    // The names of two folders are swapped.
    let swapped = tempfile::tempdir().unwrap();
    let dir = swapped.path();
    let [one, two, aside] = ["step-00000001", "step-00000002", "aside"].map(|name| dir.join(name));
    save(&mut RealDisk, dir, 1, 1).unwrap();
    save(&mut RealDisk, dir, 2, 2).unwrap();
    fs::rename(&one, &aside).and_then(|()| fs::rename(&two, &one)).and_then(|()| fs::rename(&aside, &two)).unwrap();
    assert_eq!(latest(dir), Some((2, 2)));
}

#[test]
fn the_newest_sound_one_is_never_pruned() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let flip = |step: u64| {
        let file = dir.join(format!("step-{step:08}/model.safetensors"));
        let mut bytes = fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&file, bytes).unwrap();
    };
    for step in [10, 20, 30] {
        save(&mut RealDisk, dir, step, step as u8).unwrap();
    }
    // The two newest checkpoints have the right sizes but wrong hashes.
    flip(20);
    flip(30);
    Checkpoint::prune(dir, 2, &[]).unwrap();
    assert_eq!(latest(dir), Some((10, 10)));
    save(&mut RealDisk, dir, 15, 15).unwrap();
    Checkpoint::prune(dir, 2, &[]).unwrap();
    assert_eq!(names(dir), ["step-00000010", "step-00000015", "step-00000020", "step-00000030"]);
    // Once there are enough newer usable checkpoints, the damaged ones are removed.
    save(&mut RealDisk, dir, 40, 40).unwrap();
    save(&mut RealDisk, dir, 50, 50).unwrap();
    Checkpoint::prune(dir, 2, &[]).unwrap();
    assert_eq!(names(dir), ["step-00000040", "step-00000050"]);
}

#[test]
fn a_save_steps_around_files_with_names_of_checkpoints() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path();
    let strays = ["step-00000100", "step-00000100-2.partial", "step-00000100.partial", "step-00000100.replaced"];
    strays.iter().for_each(|name| fs::write(dir.join(name), "mine").unwrap());
    for salt in 1..4 {
        let path = save(&mut RealDisk, dir, 100, salt).unwrap();
        Checkpoint::prune(dir, 1, &[]).unwrap();
        assert_eq!((path, latest(dir)), (dir.join("step-00000100-2"), Some((100, salt))));
    }
    assert!(strays.iter().all(|name| fs::read(dir.join(name)).unwrap() == b"mine"));
    assert_eq!(names(dir).len(), strays.len() + 1);
}

#[test]
fn a_newer_format_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = save(&mut RealDisk, folder.path(), 1, 1).unwrap();
    let json = br#"{"format": 3, "shards": []}"#;
    fs::write(path.join(MANIFEST), json).unwrap();
    fs::write(path.join(MANIFEST_HASH), hash_line(json)).unwrap();
    let error = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(error.contains("has format 3, but this version reads formats up to 2"), "{error}");
}

#[test]
fn another_model_is_told_by_its_keys() {
    let folder = tempfile::tempdir().unwrap();
    Checkpoint::save(folder.path(), 1, &[], json!({ "model": { "width": 384, "layers": 6 } })).unwrap();
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    checkpoint.expect("model", &json!({ "layers": 6, "width": 384 })).unwrap();
    let error = checkpoint.expect("model", &json!({ "layers": 6, "width": 512 })).unwrap_err().to_string();
    assert!(error.contains("another model: width is 384, expected 512;"), "{error}");
    let error = checkpoint.expect("data", &json!("9f2c")).unwrap_err().to_string();
    assert!(error.contains("another data: it is null, expected \"9f2c\""), "{error}");
}

#[test]
fn of_many_differences_some_are_listed_and_the_configuration_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = |width: usize| (0..9).map(|i| (format!("h.{i}"), json!([width]))).collect::<serde_json::Map<_, _>>();
    let metadata = json!({ "tensors": tensors(384), "run": { "config": { "width": 384 } } });
    Checkpoint::save(folder.path(), 1, &[], metadata).unwrap();
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    let error = checkpoint.expect("tensors", &serde_json::Value::Object(tensors(512))).unwrap_err().to_string();
    assert!(error.contains("h.2 is [384], expected [512], and 6 more; its model is {\"width\":384};"), "{error}");
    assert!(!error.contains("h.3"), "{error}");
}

#[test]
fn sections_that_cannot_be_are_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("runs");
    let tensor = |name, bytes| TensorBytes { name, dtype: DType::F32, shape: &[2], bytes };
    let section = |file, tensors| Section { file, tensors };
    let refused = |sections: &[Section<'_>]| Checkpoint::save(&dir, 1, sections, json!({})).unwrap_err().to_string();

    assert!(refused(&[section("../a.safetensors", vec![])]).contains("without folders"));
    assert!(refused(&[section("manifest.json", vec![])]).contains("must end with .safetensors"));
    let twice = || section("a.safetensors", vec![]);
    assert!(refused(&[twice(), twice()]).contains("two sections of this name"));
    let twins = vec![tensor("w", &[0; 8]), tensor("w", &[0; 8])];
    assert!(refused(&[section("a.safetensors", twins)]).contains("two tensors named w"));
    assert!(refused(&[section("a.safetensors", vec![tensor("__metadata__", &[0; 8])])]).contains("reserves the name"));
    let short = refused(&[section("a.safetensors", vec![tensor("w", &[0; 7])])]);
    assert!(short.contains("tensor w (f32 [2]) takes 8 bytes, but 7 were given"), "{short}");
    assert!(!dir.exists());
}

#[test]
fn reading_checks_names_and_sizes() {
    let folder = tempfile::tempdir().unwrap();
    save(&mut RealDisk, folder.path(), 1, 5).unwrap();
    let checkpoint = Checkpoint::latest(folder.path()).unwrap().unwrap();
    let message = checkpoint.section("model").unwrap_err().to_string();
    assert!(message.contains("it has model.safetensors, optimizer.safetensors"), "{message}");
    let section = checkpoint.section("optimizer.safetensors").unwrap();
    assert!(matches!(section.read_into("wte", &mut []), Err(CheckpointError::NoTensor { .. })));
    let wrong_size = section.read_into("wte.weight.m", &mut [0; 31]);
    assert!(matches!(wrong_size, Err(CheckpointError::TensorSize { expected: 32, found: 31, .. })));
    let tensor = section.tensor("wte.weight.m").unwrap();
    assert_eq!((tensor.dtype(), tensor.dims()), (DType::BF16, &[16][..]));
}

const DTYPES: [DType; 6] = [DType::U8, DType::U32, DType::F16, DType::BF16, DType::F32, DType::F64];

generated! {
    /// The file is identical to one that the safetensors library writes, and can be read back.
    #[test]
    fn files_are_those_of_safetensors(
        tensors in prop::collection::btree_map("[a-z\".é]{1,8}", (0usize..6, prop::collection::vec(0usize..5, 0..4)), 0..8),
        salt: u8,
    ) {
        let filled: Vec<_> = tensors
            .iter()
            .map(|(name, (dtype, shape))| {
                let bytes = shape.iter().product::<usize>() * DTYPES[*dtype].size_in_bytes();
                (name, DTYPES[*dtype], shape, (0..bytes).map(|index| index as u8 ^ salt).collect::<Vec<u8>>())
            })
            .collect();
        let views: Vec<_> = filled
            .iter()
            .map(|(name, dtype, shape, bytes)| TensorBytes { name, dtype: *dtype, shape, bytes })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let section = Section { file: "all.safetensors", tensors: views };
        let path = Checkpoint::save(folder.path(), 1, &[section], json!(null)).unwrap();

        let theirs = filled.iter().map(|(name, dtype, shape, bytes)| {
            let view = safetensors::tensor::TensorView::new((*dtype).into(), shape.to_vec(), bytes).unwrap();
            (name.as_str(), view)
        });
        let theirs = safetensors::serialize(theirs, None).unwrap();
        prop_assert!(fs::read(path.join("all.safetensors")).unwrap() == theirs);

        let checkpoint = Checkpoint::open(&path).unwrap();
        let section = checkpoint.section("all.safetensors").unwrap();
        prop_assert_eq!(section.tensors().unwrap().len(), filled.len());
        for (name, _, _, bytes) in &filled {
            let mut read = vec![!salt; bytes.len()];
            section.read_into(name, &mut read).unwrap();
            prop_assert_eq!(&read, bytes);
        }
    }
}
