"""`transformers serve` and `transformers chat`, with the Falcon models known to them.

```bash
pip install "transformers[serving]"
python examples/serve.py serve --port 8000
python examples/serve.py chat runs/my-model http://localhost:8000
```

The server speaks the OpenAI API and loads the folder or Hub name that a request gives as its model. Chats need a chat
template in the checkpoint. Continuous batching must stay off, as it is by default.
"""

import sys

import falcon_hf

if __name__ == "__main__":
    # The server looks for the class of a checkpoint in the package transformers itself.
    sys.modules["transformers"].FalconFastWeightForCausalLM = falcon_hf.FalconFastWeightForCausalLM
    from transformers.cli.transformers import main

    main()
