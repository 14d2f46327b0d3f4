/* The search of a site that is read from a disk: a page of file:// may start no worker, so the worker's script runs in
   a hidden frame of the page. mkdocs-material's plugin "offline" looks for this name before it would load another. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #ready;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inside = this.#frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      this.#ready = new Promise((loaded) => script.addEventListener("load", loaded));
      script.src = new URL(url, document.baseURI);
      inside.document.body.append(script);
    }

    async postMessage(data) {
      await this.#ready;
      this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
