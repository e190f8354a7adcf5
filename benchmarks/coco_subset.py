"""Writes an annotation file with a few images of another one, to overfit a detector on.

Usage: python benchmarks/coco_subset.py annotations/instances_train2017.json ten.json [NUMBER] [SIZE]

The first NUMBER (10) images, by id, with 1 to 5 objects and no crowd, whose objects all have a mask and at least 24 pixels on
the shorter side of their box when the longer side of the image has SIZE (256) pixels. Prints their ids. Only the categories of
their objects are kept. Train with --data ten.json:train2017 --val-share 0.
"""

import json
import sys
from pathlib import Path

MAX_OBJECTS, MIN_SIDE = 5, 24


def main(source: str, target: str, number: str = "10", size: str = "256") -> None:
    """Chooses the images and writes the file."""
    content = json.loads(Path(source).read_text())
    objects: dict[int, list] = {}
    for one in content["annotations"]:
        objects.setdefault(one["image_id"], []).append(one)
    found = [one for one in content["images"] if _qualifies(one, objects.get(one["id"], []), int(size))]
    chosen = sorted(found, key=lambda one: one["id"])[: int(number)]
    annotations = [annotation for one in chosen for annotation in objects[one["id"]]]
    used = {one["category_id"] for one in annotations}
    categories = [one for one in content["categories"] if one["id"] in used]
    Path(target).write_text(json.dumps({"images": chosen, "annotations": annotations, "categories": categories}))
    print(f"{len(found)} images qualify; chosen: {' '.join(str(one['id']) for one in chosen)}")
    print(f"{len(annotations)} objects of {len(categories)} categories")


def _qualifies(image: dict, objects: list[dict], size: int) -> bool:
    scale = size / max(image["width"], image["height"])
    return 1 <= len(objects) <= MAX_OBJECTS and all(
        not one["iscrowd"] and one["segmentation"] and scale * min(one["bbox"][2:]) >= MIN_SIDE for one in objects
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
