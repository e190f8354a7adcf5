"""The five datasets of the Long Range Arena: generators, readers of the released forms, and a prepared form for all of them."""
